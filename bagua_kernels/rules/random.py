"""Counter-based random numbers: a function of (seed, element index), the same on every device.

There is no generator and no state, so a step can be replayed, and the numbers do not depend on how the work was split.
The mixing constants are those of the `lowbias32` integer hash; `docs/wire-format.md` fixes the definition.
"""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl


def mix(x):
    """Mixes a uint32 so that each input bit changes about half of the output bits; a bijection."""
    x = tl.cast(x ^ (x >> 16), tl.uint32)
    x = tl.cast(x * 0x7FEB352D, tl.uint32)
    x = tl.cast(x ^ (x >> 15), tl.uint32)
    x = tl.cast(x * 0x846CA68B, tl.uint32)
    return tl.cast(x ^ (x >> 16), tl.uint32)


def random_key(seed_low, seed_high, index_high):
    """The two uint32 keys of all elements whose index has the high half `index_high`."""
    inner = mix(tl.cast(seed_high ^ mix(tl.cast(index_high + 0x9E3779B9, tl.uint32)), tl.uint32))
    second = mix(tl.cast(seed_low ^ mix(tl.cast(index_high + 0x85EBCA6B, tl.uint32)), tl.uint32))
    return mix(tl.cast(seed_low ^ inner, tl.uint32)), mix(tl.cast(seed_high ^ second, tl.uint32))


def random_bits(index_low, key, second_key):
    """32 random bits for the element whose index has the low half `index_low`.

    The second key enters between the two multiplications. Otherwise two seeds whose first keys differ by a small number would
    give shifted copies of one sequence.
    """
    x = tl.cast(index_low * 0x9E3779B9 + key, tl.uint32)
    x = tl.cast(x ^ (x >> 16), tl.uint32)
    x = tl.cast((x * 0x7FEB352D) ^ second_key, tl.uint32)
    x = tl.cast(x ^ (x >> 15), tl.uint32)
    x = tl.cast(x * 0x846CA68B, tl.uint32)
    return tl.cast(x ^ (x >> 16), tl.uint32)


def dither(bits):
    """Turns 32 random bits into one of 2^24 equally spaced float32 values in [-0.5, 0.5)."""
    return tl.cast(tl.cast(bits >> 8, tl.int32), tl.float32) * 5.9604644775390625e-08 - 0.5
