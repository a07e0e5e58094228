"""Block quantizers: how the scales of a block follow from its values, and an element from them to its code and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.rounding import bits_float, nearest_integer, ordered


def no_unit(low, high):
    """No sums, no unit."""
    return 1.0


def no_terms(x, unit):
    """No sums, no terms."""
    return x, x, x


def no_steps(x, unit, levels):
    """No splits, no steps."""
    return tl.cast(x, tl.int32)


def no_threshold(lower, upper, many, count):
    """No splits, no threshold."""
    return tl.cast(lower, tl.int32)


@dataclass(frozen=True)
class BlockQuantizer:
    """The rules of one block quantizer; `bagua_kernels.launchers.blockwise` runs them.

    A launcher finds the extremes of each block, and sums over it if `sums` is not 0. It computes the stored scales from
    these, and four constants from the scales, and applies `encode` to every element. A quantizer that needs fewer constants
    leaves some 0. `levels` is a compile-time argument of the rules, so that quantizers of different widths share them.

    With `splits` the sums are those of two sides of the block. Each split makes a threshold from the sums of the sides before,
    the first from a block that is all upper side. Then an element of more steps than the threshold is in the upper side. Steps
    are integers, so that each launcher adds them in the order that suits it.

    Attributes:
        name: lower-case identifier, used in caches and messages.
        words: number of 32-bit scales stored for each block, 1 or 2.
        scales: (low, high, three sums, number of elements as float32, levels) -> two int32 scales; the second is dropped if
            `words` is 1.
        encode_constants: (int32 scale, int32 scale, levels) -> four block constants.
        encode: (float32 value, four constants, float32 dither in [-0.5, 0.5), levels) -> int32, whose low `bits` are the code.
        decode_constants: (int32 scale, int32 scale, levels) -> four block constants.
        decode: (int32 code, four constants, levels) -> float32 value.
        bits: bits of a code: 8, 4, 2 or 1.
        levels: number of levels, or another number that the rules use.
        signed: True if codes are two's complement, so that `decode` gets them with their sign.
        extremes: "range": low and high are the least and greatest `ordered` key of the block. "magnitude": high is the greatest
            of its bits without the sign, low is 0.
        sums: number of sums that the rules need: 0, 1 or 3.
        unit: (low, high) -> float32 that `terms` and `steps` get.
        terms: (float32 value, unit) -> three float32 summands.
        splits: number of times that a block is split; 0 if it is not. The three sums of `scales` are then those of the lower and
            of the upper side, and the number of elements in the upper one. Not together with `sums`.
        steps: (float32 value, unit, levels) -> int32, 0 or more; the sum over a block must be below 2^31.
        threshold: (sums of both sides, number of elements in the upper one, number of elements, all float32) -> int32, 0 or
            more.
    """

    name: str
    words: int
    scales: Callable[..., Any]
    encode_constants: Callable[..., Any]
    encode: Callable[..., Any]
    decode_constants: Callable[..., Any]
    decode: Callable[..., Any]
    bits: int = 8
    levels: int = 255
    signed: bool = False
    extremes: Literal["range", "magnitude"] = "magnitude"
    sums: int = 0
    unit: Callable[..., Any] = no_unit
    terms: Callable[..., Any] = no_terms
    splits: int = 0
    steps: Callable[..., Any] = no_steps
    threshold: Callable[..., Any] = no_threshold

    def __post_init__(self) -> None:
        for name, allowed in (("bits", (1, 2, 4, 8)), ("words", (1, 2)), ("sums", (0, 1, 3))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} of quantizer {self.name!r} must be one of {allowed}, got {getattr(self, name)}"
                )
        if self.splits < 0 or (self.splits and self.sums):
            raise ValueError(
                f"splits of quantizer {self.name!r} must be 0 or more, and 0 with sums, got {self.splits} with {self.sums} sums"
            )


def safe_power(magnitude):
    """(power, inverse): factors of a block of this greatest magnitude (int32 bits) before and after its arithmetic.

    The power prevents overflow of differences in blocks up to 2^126. In blocks below 2^-60 it keeps steps, reciprocals and
    products above the subnormal numbers, which lose precision and which some devices flush to zero.
    """
    huge = magnitude >= 0x7E800000
    tiny = magnitude < 0x21800000
    pre = tl.where(huge, 0.25, tl.where(tiny, 1.2089258196146292e24, 1.0))
    post = tl.where(huge, 4.0, tl.where(tiny, 8.271806125530277e-25, 1.0))
    return pre, post


def minmax_scales(low, high, sum0, sum1, sum2, count, levels):
    """The bits of a block's least and greatest value; one fixed NaN for both where the block is not all finite."""
    # The keys of the infinities are 0x7F800000 and its mirror image; NaNs lie beyond them.
    finite = (low > -2139095041) & (high < 2139095040)
    least = tl.where(finite, ordered(low), 0x7FC00000)
    greatest = tl.where(finite, ordered(high), 0x7FC00000)
    return tl.cast(least, tl.int32), tl.cast(greatest, tl.int32)


def minmax_range(low, high):
    """A block's (low, high, range), scaled by a power of two, then that power and its inverse; all float32."""
    pre, post = safe_power(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF))
    scaled_low = bits_float(low) * pre
    scaled_high = bits_float(high) * pre
    return scaled_low, scaled_high, scaled_high - scaled_low, pre, post


def minmax_encode_constants(low, high, levels):
    """(pre, scaled minimum, codes per unit, top): the top clears the codes of a block that is not finite."""
    scaled_low, scaled_high, span, pre, post = minmax_range(low, high)
    per_unit = tl.where(span > 0.0, tl.div_rn(tl.cast(levels, tl.float32), span), 0.0)
    top = tl.where((low & 0x7FFFFFFF) > 0x7F800000, 0, levels)
    return pre, scaled_low, per_unit, tl.cast(top, tl.int32)


def minmax_encode(x, pre, scaled_low, per_unit, top, dither, levels):
    """The code of one value: its distance from the block's minimum in steps, rounded and clamped.

    Anchored at the minimum, not at zero, so that the index cannot leave its range by more than rounding.
    """
    steps = (x * pre - scaled_low) * per_unit + dither
    # Numba takes a literal for 64 bits wide, and would widen the comparison and the vectors with it.
    bottom = tl.cast(0, tl.int32)
    return tl.cast(tl.minimum(tl.maximum(nearest_integer(steps), bottom), top), tl.int32)


def minmax_decode_constants(low, high, levels):
    """(scaled minimum, scaled step, scaled maximum, post)."""
    scaled_low, scaled_high, span, pre, post = minmax_range(low, high)
    return scaled_low, tl.div_rn(span, tl.cast(levels, tl.float32)), scaled_high, post


def minmax_decode(code, scaled_low, step, scaled_high, post, levels):
    """The value of one code; the highest is the block's maximum itself, which rounding could otherwise miss or pass."""
    value = scaled_low + tl.cast(code, tl.float32) * step
    return tl.where(code == levels, scaled_high, value) * post


def minmax(bits: int) -> BlockQuantizer:
    """Levels from a block's least to its greatest value, `2^bits` of them."""
    return BlockQuantizer(
        name=f"minmax_uint{bits}",
        words=2,
        scales=minmax_scales,
        encode_constants=minmax_encode_constants,
        encode=minmax_encode,
        decode_constants=minmax_decode_constants,
        decode=minmax_decode,
        bits=bits,
        levels=(1 << bits) - 1,
        extremes="range",
    )
