"""Gradients as 8-bit floats."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class FP8AllReduce(CompressedAllReduce):
    """Gradients in 8-bit floats (after FP8-LM, Peng et al., 2023, section 2.2; scales are per block here).

    1. Each rank scales every block to the range of the format and rounds it.
    2. Ranks average by `CompressedAllReduce`: means are accumulated in float32 and rounded once, where a sum in 8 bits would
       round at every rank.
    """

    name = "fp8"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        format: str = "e4m3",
        block: int = 128,
        stochastic: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            format: "e4m3" or "e5m2".
            block: elements that share a scale; see `compression.FP8`.
            stochastic: round at random instead of to nearest, which makes the mean unbiased.
            **options: as for `CompressedAllReduce`; error feedback is off unless asked for.
        """
        codec = compression.FP8(format=format, block=block, stochastic=stochastic)
        given: CompressionOptions = {"error_feedback": False, **options}
        super().__init__(module, optimizer, codec=codec, **given)
