"""Quantizers on levels that lie evenly around zero: integers times a scale (absolute maximum, QSGD, TernGrad)."""

from __future__ import annotations

from dataclasses import replace

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.quantizers import BlockQuantizer, safe_power
from bagua_kernels.rules.rounding import bits_float, float_bits, nearest_integer


def unit_exponent(high):
    """The exponent field of a block's greatest magnitude, such that the power and its inverse both are normal numbers."""
    return tl.cast(tl.minimum(tl.maximum(high >> 23, 1), 253), tl.int32)


def magnitude_unit(low, high):
    """The power of two that brings a block's greatest magnitude to [1, 2), where squares and sums do not overflow."""
    return bits_float(tl.cast((254 - unit_exponent(high)) << 23, tl.int32))


def inverse_unit(high):
    """The inverse of `magnitude_unit`."""
    return bits_float(tl.cast(unit_exponent(high) << 23, tl.int32))


def finite_or_nan(bits, high):
    """`bits` where both they and a block's greatest magnitude are finite, else those of a fixed NaN, twice."""
    finite = (high < 0x7F800000) & ((bits & 0x7FFFFFFF) < 0x7F800000)
    word = tl.cast(tl.where(finite, bits, 0x7FC00000), tl.int32)
    return word, word


def maximum_scales(low, high, sum0, sum1, sum2, count, levels):
    """The bits of the greatest magnitude."""
    return finite_or_nan(high, high)


def norm_scales(low, high, sum0, sum1, sum2, count, levels):
    """The bits of the Euclidean norm, from the sum of squares in units; the greatest float32 where it is beyond."""
    bits = float_bits(tl.sqrt_rn(sum0) * inverse_unit(high))
    return finite_or_nan(tl.cast(tl.where(bits < 0x7F7FFFFF, bits, 0x7F7FFFFF), tl.int32), high)


def square_terms(x, unit):
    """The square of a value in units."""
    scaled = x * unit
    square = scaled * scaled
    return square, square, square


def magnitude_encode_constants(scale, unused, levels):
    """(pre, levels per unit, 0, top): the top clears the codes of a block that is not finite."""
    magnitude = scale & 0x7FFFFFFF
    pre, post = safe_power(magnitude)
    scaled = bits_float(scale) * pre
    per_unit = tl.where(scaled > 0.0, tl.div_rn(tl.cast(levels, tl.float32), scaled), 0.0)
    # An infinite scale can only have been given; a NaN times zero would leave the sign of a NaN in the code.
    top = tl.where(magnitude >= 0x7F800000, 0, levels)
    return pre, per_unit, per_unit, tl.cast(top, tl.int32)


def magnitude_encode(x, pre, per_unit, unused, top, dither, levels):
    """The number of levels from zero, signed, rounded and clamped."""
    # Numba widens a difference to 64 bits, and the comparison and the vectors with it.
    bottom = tl.cast(0 - top, tl.int32)
    steps = x * pre * per_unit + dither
    return tl.cast(tl.minimum(tl.maximum(nearest_integer(steps), bottom), top), tl.int32)


def magnitude_decode_constants(scale, unused, levels):
    """(inverse of the number of levels, scale): the inverse times the number is 1 where float32 has such a one."""
    whole = tl.cast(levels, tl.float32)
    inverse = tl.div_rn(tl.cast(1.0, tl.float32), whole)
    above = bits_float(tl.cast(float_bits(inverse) + 1, tl.int32))
    value = bits_float(scale)
    return tl.where(whole * inverse < 1.0, above, inverse), value, value, value


def magnitude_decode(code, inverse, scale, b, c, levels):
    """The value of one code, or of a sum of codes with equal scales.

    The product with the scale comes last: it is the only one that can underflow, and for the outermost codes it is the scale.
    """
    return tl.cast(code, tl.float32) * inverse * scale


def absmax(bits: int, levels: int) -> BlockQuantizer:
    """`levels` levels on either side of zero, the outermost at a block's greatest magnitude.

    With one level, TernGrad's codes; with more bits than those need, codes with equal scales can be added.
    """
    return BlockQuantizer(
        name=f"absmax_{bits}_{levels}",
        words=1,
        scales=maximum_scales,
        encode_constants=magnitude_encode_constants,
        encode=magnitude_encode,
        decode_constants=magnitude_decode_constants,
        decode=magnitude_decode,
        bits=bits,
        levels=levels,
        signed=True,
    )


def euclidean(bits: int, levels: int) -> BlockQuantizer:
    """As `absmax`, with the outermost level at a block's Euclidean norm."""
    return replace(
        absmax(bits, levels),
        name=f"euclidean_{bits}_{levels}",
        scales=norm_scales,
        sums=1,
        unit=magnitude_unit,
        terms=square_terms,
    )
