"""Bits of floats: the order-preserving map, rounding to integers, and bfloat16."""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl


def float_bits(x):
    """The bits of a float32, as int32."""
    return tl.cast(x, tl.int32, bitcast=True)


def bits_float(bits):
    """The float32 with these int32 bits."""
    return tl.cast(bits, tl.float32, bitcast=True)


def magnitude(x):
    """A float32 without its sign, also of -0."""
    return bits_float(tl.cast(float_bits(x) & 0x7FFFFFFF, tl.int32))


def ordered(bits):
    """Maps the int32 bits of a float32 to an int32 that compares as the float does, and back (it is its own inverse).

    -0 comes just before +0, and NaNs beyond the infinities of their sign. A minimum and a maximum over keys thus show any
    non-finite value at no cost. Integer minima vectorise and do not depend on their order; float ones do neither.
    """
    return tl.cast(bits ^ ((bits >> 31) & 0x7FFFFFFF), tl.int32)


def nearest_integer(x):
    """Rounds a float32 with |x| < 2^22 to the nearest int32, ties to even.

    Adding 1.5 * 2^23 leaves no bits for a fraction, so the addition itself rounds, the same on every device. Beyond the
    range, and for NaN, the result is some integer.
    """
    return tl.cast(float_bits(x + 12582912.0) - 0x4B400000, tl.int32)


def bfloat16_float(bits):
    """The float32 equal to the bfloat16 with these uint16 bits."""
    return bits_float(tl.cast(tl.cast(bits, tl.uint32) << 16, tl.int32))


def float_bfloat16(x):
    """The uint16 bits of the bfloat16 nearest to a float32, ties to even; every NaN becomes 0x7FC0."""
    bits = tl.cast(x, tl.uint32, bitcast=True)
    # Bit patterns above infinity's are NaN; adding the rounding increment could carry them into another sign.
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = tl.cast(bits + 0x7FFF + ((bits >> 16) & 1), tl.uint32) >> 16
    return tl.cast(tl.where(nan, tl.cast(0x7FC0, tl.uint32), tl.cast(rounded, tl.uint32)), tl.uint16)


def float_bfloat16_stochastic(x, noise):
    """The uint16 bits of one of the two bfloat16 next to a float32, the nearer the likelier: right on average.

    `noise` is 32 random bits, of which the upper half is added where the lower half of the float32 will be cut off.
    """
    bits = tl.cast(x, tl.uint32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    rounded = tl.cast(tl.cast(bits + (noise >> 16), tl.uint32) >> 16, tl.uint16)
    return tl.where(finite, rounded, float_bfloat16(x))


def quotient(x, y):
    """`x / y`, correctly rounded."""
    return tl.div_rn(x, y)


def resumed(value, image, wide):
    """`wide` if `value` is what it was rounded to, else `value`."""
    return tl.where(value == image, wide, value)


def identity(x):
    """`x`."""
    return x
