"""The sign of each element, with one or two means as scales, or with one of two magnitudes."""

from __future__ import annotations

from dataclasses import replace

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.magnitude import finite_or_nan, inverse_unit, magnitude_unit
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.rounding import bits_float, float_bfloat16, float_bits, magnitude, nearest_integer


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


def magnitude_steps(x, unit, levels):
    """A magnitude in steps, of which there are `levels` in a unit, rounded; those of any value are below 4 units."""
    steps = nearest_integer(magnitude(x) * unit * tl.cast(levels, tl.float32))
    most = tl.cast((levels << 2) - 1, tl.int32)
    return tl.cast(tl.minimum(tl.maximum(steps, tl.cast(0, tl.int32)), most), tl.int32)


def side_means(lower, upper, many, count):
    """(mean of the lower side, mean of the upper side), in steps; an empty side has that of the other."""
    few = count - many
    below = tl.div_rn(lower, few)
    above = tl.div_rn(upper, many)
    return tl.where(few > 0.0, below, above), tl.where(many > 0.0, above, below)


def middle_of_means(lower, upper, many, count):
    """Half the sum of both means, rounded down."""
    below, above = side_means(lower, upper, many, count)
    return tl.cast((below + above) * 0.5, tl.int32)


def mean_bits(mean, high, levels):
    """The bits of the bfloat16 nearest to a mean of steps, at most those of the greatest finite one."""
    value = tl.div_rn(mean, tl.cast(levels, tl.float32)) * inverse_unit(high)
    return tl.minimum(tl.cast(float_bfloat16(value), tl.int32), tl.cast(0x7F7F, tl.int32))


def two_magnitude_scales(low, high, lower, upper, many, count, levels):
    """The means of both sides as bfloat16, that of the upper one in the upper half of the word."""
    below, above = side_means(lower, upper, many, count)
    word = (mean_bits(above, high, levels) << 16) | mean_bits(below, high, levels)
    return finite_or_nan(tl.cast(word, tl.int32), high)


def two_magnitude_encode_constants(word, unused, levels):
    """(half of both magnitudes' sum, 0, 0, mask): the mask clears the codes of a block that is not finite."""
    lower, upper, b, c = two_magnitude_decode_constants(word, unused, levels)
    middle = lower * 0.5 + upper * 0.5
    mask = tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0, 3)
    return middle, middle, middle, tl.cast(mask, tl.int32)


def two_magnitude_encode(x, middle, b, c, mask, dither, levels):
    """1 for the upper magnitude, which is the nearer one, plus 2 for a negative value, as `sign_encode` has them."""
    upper = tl.cast(tl.where(magnitude(x) > middle, 1, 0), tl.int32)
    negative = tl.cast(tl.where(x < 0.0, 2, 0), tl.int32)
    return tl.cast((upper | negative) & mask, tl.int32)


def two_magnitude_decode_constants(word, unused, levels):
    """(lower magnitude, upper magnitude); both NaN if the word is one as a float32, as in a block that is not finite."""
    nan = (word & 0x7FFFFFFF) > 0x7F800000
    lower = bits_float(tl.cast(tl.where(nan, word, word << 16), tl.int32))
    upper = bits_float(tl.cast(tl.where(nan, word, word & -65536), tl.int32))
    return lower, upper, 0.0, 0.0


def two_magnitude_decode(code, lower, upper, c, d, levels):
    """One of the magnitudes, with the sign."""
    value = tl.where((code & 1) > 0, upper, lower)
    return tl.where((code & 2) > 0, value * -1.0, value)


def two_magnitudes(block: int) -> BlockQuantizer:
    """Two magnitudes, from steps so small that float32 still rounds them, and so few that int32 holds the sum of a block."""
    levels = min(1 << 20, (1 << 28) // block)
    return BlockQuantizer(
        name=f"sign_two_magnitudes_{levels}",
        words=1,
        scales=two_magnitude_scales,
        encode_constants=two_magnitude_encode_constants,
        encode=two_magnitude_encode,
        decode_constants=two_magnitude_decode_constants,
        decode=two_magnitude_decode,
        bits=2,
        levels=levels,
        unit=magnitude_unit,
        splits=5,
        steps=magnitude_steps,
        threshold=middle_of_means,
    )
