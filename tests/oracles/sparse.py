"""Sparsifiers written from `docs/wire-format-sparse.md` with NumPy sorts and Python integers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles.vectors import F32

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
M = 0xFFFFFFFF


def kept(ratio: float, n: int) -> int:
    return min(n, max(1, math.floor(Fraction(str(ratio)) * n)))


def keys(x: F32) -> I64:
    return (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & M
    x ^= x >> 15
    x = x * 0x846CA68B & M
    return x ^ x >> 16


def topk(x: F32, k: int) -> I64:
    """The indices of the k largest magnitudes, ascending; the lowest index among equals."""
    return np.sort(np.lexsort((np.arange(x.size), -keys(x)))[:k])


def sample(x: F32, fraction: float, ratio: float) -> F32:
    n = x.size
    wanted = max(8192, min(math.ceil(fraction * n), max(65536, math.ceil(512 / ratio))))
    if wanted >= n:
        return x
    runs, strata = n // 32, wanted // 32
    parts = []
    for i in range(strata):
        first, last = i * runs // strata, (i + 1) * runs // strata
        run = first + mix(i) % (last - first)
        parts.append(x[32 * run : 32 * run + 32])
    return np.concatenate(parts)


def threshold_topk(x: F32, ratio: float, fraction: float = 0.01) -> I64:
    n, k = x.size, kept(ratio, x.size)
    drawn = np.sort(keys(sample(x, fraction, ratio)))[::-1]
    m = drawn.size
    aim = k if m == n else max(1, math.ceil(Fraction(21, 20) * k * m / n))
    while True:
        chosen = np.flatnonzero(keys(x) >= (drawn[aim - 1] if aim <= m else 0))
        if 10 * chosen.size >= 8 * k:
            break
        aim *= 2
    return chosen if chosen.size <= capacity(k, n) else topk(x, k)


def capacity(k: int, n: int) -> int:
    return min(n, math.ceil(Fraction(13, 10) * k))


def part(a: npt.NDArray[Any]) -> U8:
    raw = np.frombuffer(a.tobytes(), np.uint8)
    return np.concatenate([raw, np.zeros(-raw.size % 16, np.uint8)])


def payload(x: F32, index: I64, room: int) -> U8:
    """The payload of the elements at `index`, with float32 values."""
    if x.size == 0:
        return np.zeros(0, np.uint8)
    limits = np.minimum(np.arange(1, -(-x.size // 65536) + 1) * 65536, x.size)
    ends = np.searchsorted(index, limits).astype("<u4")
    offsets, values = np.zeros(room, "<u2"), np.zeros(room, "<f4")
    offsets[: index.size] = index % 65536
    values[: index.size] = x[index]
    return np.concatenate([part(np.array([index.size, 0], "<u8")), part(ends), part(offsets), part(values)])


def dense(x: F32, index: I64) -> F32:
    out = np.zeros_like(x)
    out[index] = x[index]
    return out


def round_key(seed: int, r: int) -> tuple[int, int]:
    low, high = seed & M, seed >> 32
    return (
        mix(low ^ mix(high ^ mix(r + 0x9E3779B9 & M))),
        mix(high ^ mix(low ^ mix(r + 0x85EBCA6B & M))),
    )


def permutation(n: int, count: int, seed: int) -> list[int]:
    """The first indices of the keyed permutation of 0 … n-1."""
    half = 1
    while 4**half < n:
        half += 1
    mask = 2**half - 1
    round_keys = [round_key(seed, r) for r in range(8)]

    def once(i: int) -> int:
        left, right = i >> half, i & mask
        for k0, k1 in round_keys:
            x = right * 0x9E3779B9 + k0 & M
            x ^= x >> 16
            x = (x * 0x7FEB352D & M) ^ k1
            x ^= x >> 15
            x = x * 0x846CA68B & M
            left, right = right, (left ^ x ^ x >> 16) & mask
        return left << half | right

    found = []
    for i in range(count):
        i = once(i)
        while i >= n:
            i = once(i)
        found.append(i)
    return found
