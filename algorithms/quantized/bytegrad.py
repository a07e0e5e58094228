"""ByteGrad: gradients travel as one byte per element."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.compressed_all_reduce import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.compression import MinMaxUInt8


@register
class ByteGrad(CompressedAllReduce):
    """Synchronous data parallelism with gradients compressed to 8 bits (BAGUA, VLDB 2022; its `bytegrad` algorithm).

    For each bucket of gradients, in the order in which backward completes them:

    1. Encode the bucket, cut into one chunk per rank, with `MinMaxUInt8`: one byte per element, two float32 per block.
    2. All-to-all: each rank receives everyone's payload of its own chunk.
    3. Decode, average and encode the chunk again.
    4. All-gather the averages.
    5. Decode them; the same bytes, and so the same gradients, on every rank.

    A rank sends about a quarter of the bytes of a float32 all-reduce. The mean is rounded twice, to 1/255 of the range of
    256 neighbouring elements of one tensor each time.
    """

    name = "bytegrad"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        stochastic: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a range, a power of two from 32 to 4096; see `MinMaxUInt8`.
            stochastic: round at random instead of to nearest, which makes the mean unbiased.
            **options: as for `CompressedAllReduce`; error feedback is off unless asked for.
        """
        codec = MinMaxUInt8(block, stochastic)
        given: CompressionOptions = {"error_feedback": False, **options}
        super().__init__(module, optimizer, codec=codec, **given)
