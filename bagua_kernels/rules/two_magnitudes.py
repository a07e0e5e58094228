"""Two magnitudes for the kept values of a chunk, made of integers, so that no order of a sum matters."""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.rounding import bits_float, float_bfloat16

# Exponent fields below this are taken for it: products stay above the subnormal numbers, which some devices flush to zero.
LEAST_FIELD = 64
# No number of steps is greater.
EVERY = 1 << 24


def field(key):
    """The exponent field of a magnitude key, that of the smallest normal number for subnormal ones."""
    return tl.maximum(tl.cast(key >> 23, tl.int32), tl.cast(1, tl.int32))


def steps_of(key, greatest):
    """A finite magnitude in units of 2^(greatest - 150), rounded down to a whole number."""
    mantissa = tl.cast((key & 0x7FFFFF) | tl.where(key >= 0x800000, 0x800000, 0), tl.int32)
    shift = tl.minimum(tl.cast(greatest - field(key), tl.int32), tl.cast(31, tl.int32))
    return tl.cast(mantissa >> shift, tl.int32)


def magnitude_bits(total, count, greatest):
    """The bits of the bfloat16 nearest to a mean of steps, at most the greatest finite one; of 0 if there are no values."""
    mean = tl.div_rn(tl.cast(total, tl.float32), tl.cast(tl.maximum(count, tl.cast(1, tl.int64)), tl.float32))
    unit = bits_float(tl.cast(tl.cast(greatest - 23, tl.int32) << 23, tl.int32))
    return tl.minimum(tl.cast(float_bfloat16(mean * unit), tl.int32), tl.cast(0x7F7F, tl.int32))


def magnitude_value(code, magnitudes):
    """The value of an entry: by its two bits, and by the word of both magnitudes, an int32."""
    high = magnitudes & -65536
    bits = tl.where((code & 1) > 0, high, tl.cast(magnitudes << 16, tl.int32))
    value = bits_float(tl.cast(bits, tl.int32))
    return tl.where((code & 2) > 0, value * -1.0, value)
