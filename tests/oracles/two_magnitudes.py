"""Signs with two magnitudes per block: the bytes as docs/wire-format.md has them, and the values in float64."""

import numpy as np

from tests.oracles.block_rules import BOOL, I64, ONE, unit
from tests.oracles.minmax_uint8 import F32, F64, U8, ZERO


def encode(v: F32, m: F32, present: BOOL) -> tuple[F32, U8]:
    """Returns the word of each block, as float32, and the codes of its values."""
    rows, block = v.shape
    levels = min(2**20, 2**28 // block)
    u = unit(m)
    q = np.rint(np.abs(v) * u[:, None] * np.float32(levels)).astype(np.int64).clip(0, 4 * levels - 1)
    # A block that has no elements of its own is one of zero.
    present = present | (~present.any(axis=1)[:, None] & (np.arange(block) == 0))
    t = np.full(rows, -1, np.int64)
    for _ in range(5):
        lower, upper = means(q, present, t)
        t = np.floor((lower + upper) / np.float32(2)).astype(np.int64)
    a, b = (bfloat16(mean / np.float32(levels) * (ONE / u)) for mean in means(q, present, t))
    middle = as_float(a) / np.float32(2) + as_float(b) / np.float32(2)
    codes = (np.abs(v) > middle[:, None]) | (v < ZERO).astype(np.uint8) << 1
    return (b << 16 | a).astype(np.uint32).view(np.float32), codes.astype(np.uint8)


def means(q: I64, present: BOOL, t: I64) -> tuple[F32, F32]:
    """Returns for each block the mean of its q up to t, and that above."""
    lower, upper = (mean(q, present & side) for side in (q <= t[:, None], q > t[:, None]))
    return np.where(np.isnan(lower), upper, lower), np.where(np.isnan(upper), lower, upper)


def mean(q: I64, where: BOOL) -> F32:
    """Returns the mean of some numbers of each row, NaN if there are none."""
    total: F32 = np.where(where, q, 0).sum(axis=1).astype(np.float32)
    return total / where.sum(axis=1).astype(np.float32)


def bfloat16(x: F32) -> I64:
    """Returns the bits of the finite bfloat16 nearest to numbers that are not negative."""
    bits = x.view(np.uint32).astype(np.int64)
    return np.minimum(bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7F7F)


def as_float(bits: I64) -> F32:
    return (bits << 16).astype(np.uint32).view(np.float32)


def decode(scales: F32, codes: U8) -> F32:
    word = scales[:, :1].copy().view(np.uint32).astype(np.int64)
    magnitude = np.where(codes & 1, as_float(word >> 16), as_float(word & 0xFFFF))
    return np.where(codes & 2, -magnitude, magnitude)


def ideal(v: F64) -> F64:
    """Returns what exact arithmetic makes of one block: two means, and which side of a threshold each value is on."""
    size = np.abs(v)
    t = size.mean()
    for _ in range(4):
        lower, upper = size[size <= t], size[size > t]
        if upper.size:
            t = (lower.mean() + upper.mean()) / 2
    out = np.zeros_like(size)
    for side in (size <= t, size > t):
        if side.any():
            out[side] = size[side].mean()
    return np.where(v < 0, -out, out)
