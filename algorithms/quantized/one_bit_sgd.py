"""1-bit SGD: signs with two magnitudes per block."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import (
    LARGE_MATRICES,
    CompressedAllReduce,
    CompressionOptions,
    ScaledOptions,
)
from bagua_kernels.algorithms.registry import register


@register
class OneBitSGD(CompressedAllReduce):
    """Signs with two magnitudes per block (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014).

    1. In the first `warmup_steps` steps, average without compression: early gradients change too fast for residuals.
    2. Then each rank adds its residual to its gradient and sends signs. For each block (the paper: for each column) it also
       sends the mean of the elements below zero and that of the others.
    3. Owners of chunks do the same with the mean.
    """

    name = "onebit"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        warmup_steps: int = 100,
        **options: Unpack[ScaledOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share magnitudes; see `compression.Sign`.
            warmup_steps: steps without compression at the beginning.
            **options: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        codec = compression.Sign(block, two_means=True)
        given: CompressionOptions = {"warmup_steps": warmup_steps, **LARGE_MATRICES, **options}
        super().__init__(module, optimizer, codec=codec, **given)
