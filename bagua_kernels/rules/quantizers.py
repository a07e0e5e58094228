"""Block quantizers: how the scales of a block follow from its range, and an element from them to its code and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_kernels.jit import vocabulary as tl
from bagua_kernels.rules.rounding import bits_float, nearest_integer, ordered


@dataclass(frozen=True)
class BlockQuantizer:
    """The rules of one block quantizer; `bagua_kernels.launchers.blockwise` runs them.

    A launcher finds the least and the greatest `ordered` key of each block, makes the stored scales from them, makes four
    constants from the scales, and applies `encode` to every element. A quantizer that needs fewer constants leaves some 0.

    Attributes:
        name: lower-case identifier, used in caches and messages.
        words: number of 32-bit scales stored for each block, 1 or 2.
        scales: (least key, greatest key) -> `words` int32 scales, always a pair; the second is dropped if `words` is 1.
        encode_constants: (int32 scale, int32 scale) -> four block constants.
        encode: (float32 value, four constants, float32 dither in [-0.5, 0.5)) -> int32 code from 0 to 255.
        decode_constants: (int32 scale, int32 scale) -> four block constants.
        decode: (int32 code, four constants) -> float32 value.
    """

    name: str
    words: int
    scales: Callable[..., Any]
    encode_constants: Callable[..., Any]
    encode: Callable[..., Any]
    decode_constants: Callable[..., Any]
    decode: Callable[..., Any]


def minmax_scales(low_key, high_key):
    """The bits of a block's least and greatest value; one fixed NaN for both where the block is not all finite."""
    # The keys of the infinities are 0x7F800000 and its mirror image; NaNs lie beyond them.
    finite = (low_key > -2139095041) & (high_key < 2139095040)
    low = tl.where(finite, ordered(low_key), 0x7FC00000)
    high = tl.where(finite, ordered(high_key), 0x7FC00000)
    return tl.cast(low, tl.int32), tl.cast(high, tl.int32)


def minmax_range(low, high):
    """A block's (low, high, range), scaled by a power of two, then that power and its inverse; all float32.

    The power keeps `high - low` from overflowing (blocks reaching 2^126) and keeps the step, its reciprocal and every product
    out of the subnormal numbers (blocks below 2^-60), where precision is lost and some devices flush to zero.
    """
    largest = tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
    huge = largest >= 0x7E800000
    tiny = largest < 0x21800000
    pre = tl.where(huge, 0.25, tl.where(tiny, 1.2089258196146292e24, 1.0))
    post = tl.where(huge, 4.0, tl.where(tiny, 8.271806125530277e-25, 1.0))
    scaled_low = bits_float(low) * pre
    scaled_high = bits_float(high) * pre
    return scaled_low, scaled_high, scaled_high - scaled_low, pre, post


def minmax_encode_constants(low, high):
    """(pre, scaled minimum, codes per unit, mask): the mask clears the codes of a block that is not finite."""
    scaled_low, scaled_high, span, pre, post = minmax_range(low, high)
    per_unit = tl.where(span > 0.0, tl.div_rn(tl.cast(255.0, tl.float32), span), 0.0)
    mask = tl.where((low & 0x7FFFFFFF) > 0x7F800000, 0, 255)
    return pre, scaled_low, per_unit, mask


def minmax_encode(x, pre, scaled_low, per_unit, mask, dither):
    """The code of one value: its distance from the block's minimum in steps, rounded and clamped.

    Anchored at the minimum, not at zero, so that the index cannot leave 0..255 by more than rounding.
    """
    steps = (x * pre - scaled_low) * per_unit + dither
    code = tl.minimum(tl.maximum(nearest_integer(steps), 0), 255)
    return tl.cast(code & mask, tl.int32)


def minmax_decode_constants(low, high):
    """(scaled minimum, scaled step, scaled maximum, post)."""
    scaled_low, scaled_high, span, pre, post = minmax_range(low, high)
    return scaled_low, tl.div_rn(span, tl.cast(255.0, tl.float32)), scaled_high, post


def minmax_decode(code, scaled_low, step, scaled_high, post):
    """The value of one code; the highest is the block's maximum itself, which rounding could otherwise miss or pass."""
    value = scaled_low + tl.cast(code, tl.float32) * step
    return tl.where(code == 255, scaled_high, value) * post


MINMAX_UINT8 = BlockQuantizer(
    name="minmax_uint8",
    words=2,
    scales=minmax_scales,
    encode_constants=minmax_encode_constants,
    encode=minmax_encode,
    decode_constants=minmax_decode_constants,
    decode=minmax_decode,
)
