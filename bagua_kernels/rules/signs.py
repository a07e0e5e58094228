"""One bit an element: the sign, and one or two means as scales."""

from __future__ import annotations

from dataclasses import replace

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.magnitude import finite_or_nan, inverse_unit, magnitude_unit
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.rounding import bits_float, float_bits, magnitude


def magnitude_terms(x, unit):
    """The magnitude in units."""
    scaled = magnitude(x) * unit
    return scaled, scaled, scaled


def side_terms(x, unit):
    """(magnitude if negative, value if not, 1 if negative): what the means of both sides are made of."""
    scaled = x * unit
    negative = x < 0.0
    return tl.where(negative, scaled * -1.0, 0.0), tl.where(negative, 0.0, scaled), tl.where(negative, 1.0, 0.0)


def mean_scales(low, high, total, sum1, sum2, count, levels):
    """The bits of the mean magnitude."""
    return finite_or_nan(float_bits(tl.div_rn(total, count) * inverse_unit(high)), high)


def two_mean_scales(low, high, negatives, others, k, count, levels):
    """The bits of the mean magnitude of the negative values, and of the mean of the others; 0 for an empty side."""
    post = inverse_unit(high)
    first = tl.where(k > 0.0, tl.div_rn(negatives, k), 0.0) * post
    second = tl.where(count > k, tl.div_rn(others, count - k), 0.0) * post
    low_word, spare = finite_or_nan(float_bits(first), high)
    high_word, spare = finite_or_nan(float_bits(second), high)
    return low_word, high_word


def sign_encode_constants(first, second, levels):
    """(0, 0, 0, mask): the mask clears the codes of a block that is not finite."""
    value = bits_float(first)
    mask = tl.where((first & 0x7FFFFFFF) > 0x7F800000, 0, 1)
    return value, value, value, tl.cast(mask, tl.int32)


def sign_encode(x, a, b, c, mask, dither, levels):
    """1 for a negative value, else 0, also for -0: every rank decides alike."""
    return tl.cast(tl.where(x < 0.0, 1, 0) & mask, tl.int32)


def sign_decode_constants(first, second, levels):
    """(value of a negative element, value of another)."""
    return bits_float(first) * -1.0, bits_float(second), 0.0, 0.0


def sign_decode(code, negative, other, c, d, levels):
    """The mean of the element's side."""
    return tl.where(code > 0, negative, other)


SIGN = BlockQuantizer(
    name="sign",
    words=1,
    scales=mean_scales,
    encode_constants=sign_encode_constants,
    encode=sign_encode,
    decode_constants=sign_decode_constants,
    decode=sign_decode,
    bits=1,
    levels=1,
    sums=1,
    unit=magnitude_unit,
    terms=magnitude_terms,
)
SIGN_TWO_MEANS = replace(SIGN, name="sign_two_means", words=2, scales=two_mean_scales, sums=3, terms=side_terms)
