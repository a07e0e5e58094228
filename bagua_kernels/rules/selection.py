"""Which elements a sparsifying codec keeps: by the key of their magnitude, or by a permutation of the indices."""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.random import random_bits
from bagua_kernels.rules.rounding import float_bits


def magnitude_key(x):
    """An int32 that compares as the magnitude of a float32 does; infinities above all numbers, NaNs above infinities.

    So a value that is not finite is selected before any other and reaches the receiver.
    """
    return tl.cast(float_bits(x) & 0x7FFFFFFF, tl.int32)


def feistel_left(left, right, mask, key, second_key):
    """The new right half after a round of a Feistel network on two halves of `mask` bits each, all uint32."""
    return tl.cast((left ^ random_bits(right, key, second_key)) & mask, tl.uint32)


def joined(left, right, bits):
    """The int64 index of which `left` and `right` are the halves, `bits` each."""
    return tl.cast((tl.cast(left, tl.int64) << bits) | tl.cast(right, tl.int64), tl.int64)


def left_half(index, bits):
    """The high half of an int64 index, as uint32."""
    return tl.cast(index >> bits, tl.uint32)


def right_half(index, mask):
    """The low half of an int64 index, as uint32."""
    return tl.cast(tl.cast(index, tl.uint32) & mask, tl.uint32)
