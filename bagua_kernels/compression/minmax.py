"""Min-max quantization: each block is a uniform grid from its least to its greatest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, Unbiased, register
from bagua_kernels.rules.quantizers import BlockQuantizer, minmax


class MinMax(BlockCodec):
    """The common part of the min-max codecs."""

    RULE: ClassVar[BlockQuantizer]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stochastic and self._relative() >= 1:
            raise ValueError(
                f"{self.RULE.levels + 1} levels rounded to nearest are no contraction at block={self.block}: a value near "
                f"zero may gain more than it had; use stochastic=True or a smaller block"
            )

    def _relative(self) -> float:
        """The bound of the squared error, relative to that of the vector.

        In the worst block two elements are at the ends of the range; their squared norm is at least range^2 / 2. All others are
        zero, half-way between two levels. Each has an error (or, rounded stochastically, a variance) of step^2 / 4.
        """
        return (self.block - 2) / 4 / (self.RULE.levels**2 / 2)

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return self.RULE

    @property
    def bias(self) -> Unbiased | Contractive:
        """The bound for the worst block."""
        return Unbiased(self._relative()) if self.stochastic else Contractive(1.0 - self._relative())


@dataclass(frozen=True)
class MinMaxUInt8(MinMax):
    """8 bits per element on a grid of 256 levels from a block's minimum to its maximum (BAGUA, VLDB 2022, section 3.1).

    The grid starts at the block's minimum and the levels are clamped, which BAGUA's own formula does not do. A block far from
    zero, or with a range below 1e-7, therefore keeps its full precision. A block of equal values is exact, and scaling the
    input scales the output. A block with an inf or NaN decodes to NaN.

    Attributes:
        block: elements per block, a power of two from 32 to 4096. Smaller blocks follow the data more closely and cost more:
            1.03 bytes per element at 256, 1.25 at 32.
        stochastic: round up or down at random, so that the error is zero on average, instead of to the nearest level.
    """

    block: int = 256
    stochastic: bool = False
    RULE: ClassVar[BlockQuantizer] = minmax(8)


@dataclass(frozen=True)
class MinMaxUInt4(MinMax):
    """4 bits per element on a grid of 16 levels from a block's minimum to its maximum; otherwise as `MinMaxUInt8`.

    Attributes:
        block: elements per block, a power of two from 32 to 4096, at most 256 with rounding to nearest; 0.53 bytes per
            element at 256.
        stochastic: round up or down at random.
    """

    block: int = 256
    stochastic: bool = False
    RULE: ClassVar[BlockQuantizer] = minmax(4)


@dataclass(frozen=True)
class MinMaxUInt2(MinMax):
    """2 bits per element on a grid of 4 levels from a block's minimum to its maximum; otherwise as `MinMaxUInt8`.

    Rounding to nearest is refused, because zero is half-way between two of four levels. The error of a block of small values with
    two large ones would then exceed the block itself, and error feedback would diverge.

    Attributes:
        block: elements per block, a power of two from 32 to 4096; 0.28 bytes per element at 256, 0.5 at 32.
        stochastic: True.
    """

    block: int = 256
    stochastic: bool = True
    RULE: ClassVar[BlockQuantizer] = minmax(2)


register("minmax_uint8", MinMaxUInt8)
register("minmax_uint4", MinMaxUInt4)
register("minmax_uint2", MinMaxUInt2)
