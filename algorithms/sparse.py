"""Algorithms that send a few elements of a gradient, and remember the others."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import LARGE_MATRICES, CompressedAllReduce
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
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            ratio: of elements that are sent; 0.001 to 0.01.
            **arguments: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        super().__init__(module, optimizer, codec=compression.TopK(ratio), **{**LARGE_MATRICES, **arguments})


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
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            ratio: of elements that are sent; 0.05 to 0.2.
            **arguments: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        super().__init__(module, optimizer, codec=compression.RandomK(ratio), **{**LARGE_MATRICES, **arguments})
