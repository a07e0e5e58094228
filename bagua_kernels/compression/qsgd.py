"""QSGD: stochastic rounding to levels of a block's norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from bagua_kernels.compression.absmax import level_variance
from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Unbiased, register
from bagua_kernels.rules.magnitude import absmax, euclidean
from bagua_kernels.rules.quantizers import BlockQuantizer

WIDTHS = (2, 4, 8)
_rule = {"max": cache(absmax), "l2": cache(euclidean)}


def least_width(levels: int) -> int | None:
    """The bits of a code for this number of levels on either side of zero; None if there are too many."""
    return next((width for width in WIDTHS if levels < 1 << (width - 1)), None)


@dataclass(frozen=True)
class QSGD(BlockCodec):
    """Unbiased quantization to `levels` levels on either side of zero (Alistarh et al., NeurIPS 2017, section 3).

    1. n = the block's greatest magnitude (`norm="max"`) or its Euclidean norm (`norm="l2"`, the paper's theorem).
    2. r = levels * v / n for each value, rounded down or up with the probability that makes the mean r.
    3. Sent are n and the integers; decoded is n * r / levels.

    The greatest magnitude as norm costs nothing in unbiasedness and has several times less variance at few levels. Codes are
    of fixed width, 2, 4 or 8 bits: entropy coding would give every rank another length and does not suit GPUs.

    Attributes:
        bits: width of a code, 2, 4 or 8, for 2^(bits - 1) - 1 levels.
        levels: number of levels, 1 to 127, instead; codes then take the least width that holds them.
        norm: "max" or "l2".
        block: elements a block, a power of two from 32 to 4096.
    """

    bits: int | None = None
    levels: int | None = None
    norm: str = "max"
    block: int = 128
    stochastic: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in _rule:
            raise ValueError(f"the norm must be 'max' or 'l2', got {self.norm!r}")
        if self.bits is not None and self.levels is not None and self.bits != least_width(self.levels):
            raise ValueError(
                f"give bits or levels, or those that go together, got bits={self.bits}, levels={self.levels}"
            )
        bits = 4 if self.bits is None and self.levels is None else self.bits
        if bits is not None and (not isinstance(bits, int) or bits not in WIDTHS):
            raise ValueError(f"bits must be 2, 4 or 8, got {bits}; or give levels, 1 to 127")
        if self.levels is not None and (not isinstance(self.levels, int) or not 1 <= self.levels <= 127):
            raise ValueError(f"levels must be an integer from 1 to 127, got {self.levels}")
        # Equal codecs must compare equal, however they were described.
        if self.levels is None:
            assert bits is not None
            object.__setattr__(self, "levels", (1 << (bits - 1)) - 1)
        assert self.levels is not None
        object.__setattr__(self, "bits", least_width(self.levels))

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        assert self.bits is not None
        assert self.levels is not None
        return _rule[self.norm](self.bits, self.levels)

    @property
    def bias(self) -> Unbiased:
        """The bound for the worst block; with `norm="l2"` that of the paper's lemma 3.1, with the variance's factor 1/4."""
        assert self.levels is not None
        if self.norm == "max":
            return Unbiased(level_variance(self.block, self.levels))
        return Unbiased(min(self.block / (4 * self.levels**2), self.block**0.5 / self.levels))


register("qsgd", QSGD)
