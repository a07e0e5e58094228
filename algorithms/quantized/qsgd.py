"""QSGD: gradients rounded at random to a few levels."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class QSGD(CompressedAllReduce):
    """Gradients rounded at random to a few levels (Alistarh et al., NeurIPS 2017, section 3).

    1. Each rank rounds every block of `block` elements to multiples of its norm over the number of levels, at random and
       without bias.
    2. Ranks average by `CompressedAllReduce`, which rounds the mean likewise.

    No error feedback: around a quantizer of so much variance it diverges. The paper scales by the 2-norm; the largest
    element, the default, has less variance.
    """

    name = "qsgd"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        bits: int = 4,
        block: int = 128,
        norm: str = "max",
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            bits: of an element, 2, 4 or 8.
            block: elements that share a norm; see `compression.QSGD`.
            norm: "max" or "l2".
            **options: as for `CompressedAllReduce`.
        """
        super().__init__(module, optimizer, codec=compression.QSGD(bits=bits, block=block, norm=norm), **options)
