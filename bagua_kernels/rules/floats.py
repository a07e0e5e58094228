"""8-bit codes that are floating-point numbers themselves: powers of two (natural compression) and FP8."""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.magnitude import inverse_unit, magnitude_unit, maximum_scales
from bagua_kernels.rules.quantizers import BlockQuantizer, safe_power
from bagua_kernels.rules.rounding import bits_float, float_bits, magnitude, nearest_integer


def natural_scales(low, high, sum0, sum1, sum2, count, levels):
    """The bits of the power of two below the greatest magnitude."""
    word = tl.cast(tl.where(high < 0x7F800000, float_bits(inverse_unit(high)), 0x7FC00000), tl.int32)
    return word, word


def natural_encode_constants(scale, unused, levels):
    """(unit, 0, 0, mask): the mask clears the codes of a block that is not finite."""
    finite = scale < 0x7F800000
    mask = tl.cast(tl.where(finite, 255, 0), tl.int32)
    unit = tl.where(finite, magnitude_unit(scale, scale), 0.0)
    return unit, unit, unit, mask


def natural_encode(x, unit, b, c, mask, dither, levels):
    """One of the two powers of two around a value, drawn so that the mean is right.

    The mantissa's fraction is the probability of the upper one. Below the smallest power, of code 1, it is drawn against zero.
    """
    scaled = tl.cast(float_bits(x * unit) & 0x7FFFFFFF, tl.int32)
    uniform = dither + 0.5
    exponent = tl.cast(scaled >> 23, tl.int32)
    fraction = tl.cast(tl.cast(scaled & 0x7FFFFF, tl.int32), tl.float32)
    upper = tl.cast(tl.where(uniform * 8388608.0 < fraction, 1, 0), tl.int32)
    inner = tl.cast(exponent - 1 + upper, tl.int32)
    clamped = tl.cast(tl.where(inner > 127, 127, inner), tl.int32)
    smallest = tl.cast(tl.where(uniform < bits_float(scaled) * 4.253529586511731e37, 1, 0), tl.int32)
    code = tl.cast(tl.where(exponent < 2, smallest, clamped), tl.int32)
    sign = tl.cast(tl.where(x < 0.0, 128, 0), tl.int32)
    return tl.cast(tl.where(code > 0, code | sign, 0) & mask, tl.int32)


def natural_decode_constants(scale, unused, levels):
    """(scale,)."""
    value = bits_float(scale)
    return value, value, value, value


def natural_decode(code, scale, b, c, d, levels):
    """A power of two times the scale; NaN times zero stays NaN."""
    exponent = code & 127
    power = bits_float(tl.cast(tl.where(exponent > 0, (exponent + 1) << 23, 0), tl.int32))
    value = power * scale
    return tl.where(code > 127, value * -1.0, value)


NATURAL = BlockQuantizer(
    name="natural",
    words=1,
    scales=natural_scales,
    encode_constants=natural_encode_constants,
    encode=natural_encode,
    decode_constants=natural_decode_constants,
    decode=natural_decode,
)


def fp8_greatest(mantissa):
    """The greatest finite value of the format with this many mantissa bits: e4m3 or e5m2."""
    return tl.cast(tl.where(mantissa == 3, 448.0, 57344.0), tl.float32)


def fp8_encode_constants(scale, unused, mantissa):
    """(pre, format's greatest over the scale, 0, greatest code): the last clears the codes of a block that is not finite."""
    bits = scale & 0x7FFFFFFF
    pre, post = safe_power(bits)
    scaled = bits_float(scale) * pre
    per_unit = tl.where(scaled > 0.0, tl.div_rn(fp8_greatest(mantissa), scaled), 0.0)
    top = tl.where(bits > 0x7F800000, 0, tl.where(mantissa == 3, 0x7E, 0x7B))
    return pre, per_unit, per_unit, tl.cast(top, tl.int32)


def fp8_code(x, pre, per_unit, top, normal, subnormal):
    """Joins the codes of normal and subnormal numbers, clamps them and adds the sign."""
    code = tl.cast(tl.where(subnormal >= 0, subnormal, normal), tl.int32)
    low = tl.cast(tl.where(code > 0, code, 0), tl.int32)
    clamped = tl.minimum(low, top)
    sign = tl.cast(tl.where(x < 0.0, 128, 0), tl.int32)
    return tl.cast(tl.where(clamped > 0, clamped | sign, 0), tl.int32)


def fp8_scaled(x, pre, per_unit):
    """The magnitude of a value in the format's range."""
    return magnitude(x * pre) * per_unit


def fp8_nearest(x, pre, per_unit, unused, top, dither, mantissa):
    """Rounds to the nearest number of the format, ties to even, by adding half a unit to the bits."""
    scaled = fp8_scaled(x, pre, per_unit)
    bits = float_bits(scaled)
    shift = 23 - mantissa
    bias = tl.where(mantissa == 3, 7, 15)
    half = (1 << (shift - 1)) - 1
    rounded = tl.cast(bits + half + ((bits >> shift) & 1), tl.int32)
    normal = tl.cast((rounded >> shift) - ((127 - bias) << mantissa), tl.int32)
    small = nearest_integer(scaled * tl.where(mantissa == 3, 512.0, 65536.0))
    subnormal = tl.where(scaled < tl.where(mantissa == 3, 0.015625, 6.103515625e-05), small, -1)
    return fp8_code(x, pre, per_unit, top, normal, subnormal)


def fp8_stochastic(x, pre, per_unit, unused, top, dither, mantissa):
    """Rounds up with the probability of the fraction that is dropped, by adding a random part of a unit to the bits."""
    scaled = fp8_scaled(x, pre, per_unit)
    bits = float_bits(scaled)
    shift = 23 - mantissa
    bias = tl.where(mantissa == 3, 7, 15)
    part = tl.cast((dither + 0.5) * tl.where(mantissa == 3, 1048576.0, 2097152.0), tl.int32)
    raised = tl.cast(bits + part, tl.int32)
    normal = tl.cast((raised >> shift) - ((127 - bias) << mantissa), tl.int32)
    drawn = nearest_integer(scaled * tl.where(mantissa == 3, 512.0, 65536.0) + dither)
    small = tl.cast(tl.where(drawn > 0, drawn, 0), tl.int32)
    subnormal = tl.where(scaled < tl.where(mantissa == 3, 0.015625, 6.103515625e-05), small, -1)
    return fp8_code(x, pre, per_unit, top, normal, subnormal)


def fp8_decode_constants(scale, unused, mantissa):
    """(scale over the format's greatest, scaled greatest magnitude, post, 0)."""
    pre, post = safe_power(scale & 0x7FFFFFFF)
    scaled = bits_float(scale) * pre
    return tl.div_rn(scaled, fp8_greatest(mantissa)), scaled, post, post


def fp8_decode(code, step, scaled, post, unused, mantissa):
    """The value of one code; the greatest is the scale itself, which a rounded step could miss."""
    number = code & 127
    bias = tl.where(mantissa == 3, 7, 15)
    normal = bits_float(tl.cast((number << (23 - mantissa)) + ((127 - bias) << 23), tl.int32))
    small = tl.cast(number, tl.float32) * tl.where(mantissa == 3, 0.001953125, 1.52587890625e-05)
    inner = tl.where(number >= (1 << mantissa), normal, small) * step
    value = tl.where(number >= tl.where(mantissa == 3, 0x7E, 0x7B), scaled, inner) * post
    return tl.where(code > 127, value * -1.0, value)


def fp8(mantissa: int, stochastic: bool) -> BlockQuantizer:
    """e4m3 (3 mantissa bits) or e5m2 (2), the greatest number of the format at a block's greatest magnitude."""
    return BlockQuantizer(
        name=f"fp8_e{7 - mantissa}m{mantissa}_{'stochastic' if stochastic else 'nearest'}",
        words=1,
        scales=maximum_scales,
        encode_constants=fp8_encode_constants,
        encode=fp8_stochastic if stochastic else fp8_nearest,
        decode_constants=fp8_decode_constants,
        decode=fp8_decode,
        levels=mantissa,
    )
