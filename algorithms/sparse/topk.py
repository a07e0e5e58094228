"""Top-k: the largest elements."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class TopK(CompressedAllReduce):
    """Each rank sends its largest elements (Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, algorithm 1).

    1. Each rank adds its memory to its gradient, and sends the `ratio` of elements of each bucket that are largest in
       magnitude, with their places.
    2. Everyone adds up everyone's: bytes grow with the number of ranks.
    3. What was not sent is the new memory.
    """

    name = "topk"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ratio: float = 0.01,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            ratio: of elements that are sent; 0.001 to 0.01.
            **options: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        given: CompressionOptions = {**LARGE_MATRICES, **options}
        super().__init__(module, optimizer, codec=compression.TopK(ratio), **given)
