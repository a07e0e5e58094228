"""Absolute-maximum quantization: signed integers times a block's greatest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, Unbiased, register
from bagua_kernels.rules.magnitude import absmax
from bagua_kernels.rules.quantizers import BlockQuantizer


def level_variance(block: int, levels: int) -> float:
    """The bound of the relative variance of stochastic rounding to levels up to a block's greatest magnitude.

    One element is at the outermost level and exact. The variance of another element of r steps is at most 1/4 and at most r.
    Their sum is below (block - 1) / 4 steps^2, and below sqrt(block - 1) / (2 levels) of the norm.
    """
    return min((block - 1) / (4 * levels**2), math.sqrt(block - 1) / (2 * levels))


class AbsMax(BlockCodec):
    """The common part of the absolute-maximum codecs."""

    RULE: ClassVar[BlockQuantizer]

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return self.RULE

    @property
    def bias(self) -> Unbiased | Contractive:
        """The bound for the worst block: all elements but the greatest lie half-way between two levels.

        Rounded to nearest these are the half-way points next to zero, which have least norm beside their error.
        """
        if self.stochastic:
            return Unbiased(level_variance(self.block, self.RULE.levels))
        return Contractive(1.0 / (1.0 + (self.block - 1) / (4 * self.RULE.levels**2)))


@dataclass(frozen=True)
class AbsMaxInt8(AbsMax):
    """8 bits per element: -127 to 127 times the 127th part of a block's greatest magnitude.

    Zero stays zero, and a block of equal values is exact. Scaling the input scales the output. A block with an inf or NaN decodes
    to NaN. Scales take half as many bytes as with `MinMaxUInt8`, and values around zero are as exact.

    Attributes:
        block: elements per block, a power of two from 32 to 4096; 1.016 bytes per element at 256.
        stochastic: round up or down at random, so that the error is zero on average, instead of to the nearest level.
    """

    block: int = 256
    stochastic: bool = False
    RULE: ClassVar[BlockQuantizer] = absmax(8, 127)


@dataclass(frozen=True)
class AbsMaxInt4(AbsMax):
    """4 bits per element: -7 to 7 times the 7th part of a block's greatest magnitude; otherwise as `AbsMaxInt8`.

    Attributes:
        block: elements per block, a power of two from 32 to 4096; 0.53 bytes per element at 128.
        stochastic: round up or down at random.
    """

    block: int = 128
    stochastic: bool = False
    RULE: ClassVar[BlockQuantizer] = absmax(4, 7)


register("absmax_int8", AbsMaxInt8)
register("absmax_int4", AbsMaxInt4)
