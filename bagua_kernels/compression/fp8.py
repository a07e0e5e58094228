"""FP8 with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, Unbiased, register
from bagua_kernels.rules.floats import fp8
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.suggestions import did_you_mean

# (mantissa bits, greatest finite value, spacing of the subnormal numbers)
FORMATS = {"e4m3": (3, 448.0, 2.0**-9), "e5m2": (2, 57344.0, 2.0**-16)}
_rule = cache(fp8)


@dataclass(frozen=True)
class FP8(BlockCodec):
    """8-bit floats, scaled so that the greatest magnitude of a block is the greatest number of the format.

    The formats are those of Micikevicius et al., "FP8 formats for deep learning", 2022. The
    power-of-two scales of OCP's microscaling formats clamp a block's maximum by up to 12.5 % (e4m3) or 25 % (e5m2). Here the
    maximum is exact. The relative error is bounded for values down to 2^-14 (e4m3) or 2^-29 (e5m2) of a block's greatest;
    integers lose small values much earlier.

    Attributes:
        format: "e4m3" (3 mantissa bits) or "e5m2" (2).
        block: elements per block, a power of two from 32 to 4096.
        stochastic: round up or down at random, so that the error is zero on average, instead of to nearest, ties to even.
    """

    format: str = "e4m3"
    block: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(
                f"the format must be one of {', '.join(FORMATS)}, got {self.format!r}{did_you_mean(self.format, FORMATS)}"
            )

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return _rule(FORMATS[self.format][0], self.stochastic)

    @property
    def bias(self) -> Unbiased | Contractive:
        """Half a unit of the mantissa for normal numbers, half the spacing for subnormal ones.

        Stochastic rounding has at most the variance of a value half-way, which is the square of the same error.
        """
        mantissa, greatest, spacing = FORMATS[self.format]
        relative = 4.0 ** -(mantissa + 1) + (self.block - 1) * (spacing / 2 / greatest) ** 2
        return Unbiased(relative) if self.stochastic else Contractive(1.0 - relative)


register("fp8", FP8)
