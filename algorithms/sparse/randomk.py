"""Random-k: elements on which ranks agree by a seed."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class RandomK(CompressedAllReduce):
    """All ranks send the same random elements (Stich et al., NeurIPS 2018, algorithm 1).

    1. By a seed that they share, ranks agree on the `ratio` of elements of each bucket to send, others in each step.
    2. Each adds its memory to its gradient; the network averages these elements, no places are sent.
    3. What was not sent is the new memory.
    """

    name = "randomk"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ratio: float = 0.05,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            ratio: of elements that are sent; 0.05 to 0.2.
            **options: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        given: CompressionOptions = {**LARGE_MATRICES, **options}
        super().__init__(module, optimizer, codec=compression.RandomK(ratio), **given)
