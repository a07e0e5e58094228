"""Natural compression: gradients rounded to powers of two."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class NaturalCompression(CompressedAllReduce):
    """Gradients rounded to powers of two (Horvath et al., 2019, natural compression).

    1. Each rank rounds every element at random to one of the two neighbouring powers of two, without bias. The variance is
       at most an eighth of the square.
    2. Ranks average by `CompressedAllReduce`, which rounds the mean likewise.
    """

    name = "natural"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share the largest power; see `compression.Natural`.
            **options: as for `CompressedAllReduce`.
        """
        super().__init__(module, optimizer, codec=compression.Natural(block), **options)
