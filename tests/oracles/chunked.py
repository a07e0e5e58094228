"""ChunkedTopK written from `docs/wire-format-sparse.md`, one chunk at a time, with vectors of single bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.oracles.sparse import I64, U8, keys, part, topk
from tests.oracles.vectors import F32

Bits = npt.NDArray[np.bool_]
INFINITY = 0x7F800000
NAN = 0x7FC0
GREATEST = 0x7F7F


def low_bits(k: int, chunk: int) -> int:
    """The greatest l with 2^l k <= chunk."""
    return (chunk // k).bit_length() - 1


def words(k: int, chunk: int) -> tuple[int, int, int, int]:
    """The 32-bit words of the parts of a record: low, high, codes, magnitudes."""
    low = low_bits(k, chunk)
    return -(-k * low // 32), -(-(k + (chunk >> low)) // 32), -(-2 * k // 32), 1


def kept(m: int, k: int, chunk: int) -> int:
    """The number of entries of a chunk that has m elements."""
    return max(1, (2 * k * m + chunk) // (2 * chunk))


def payload_size(n: int, k: int, chunk: int) -> int:
    size = 4 * sum(words(k, chunk)) * -(-n // chunk)
    return size + -size % 16


def encode(x: F32, k: int, chunk: int) -> U8:
    records = [record(x[start : start + chunk], k, chunk) for start in range(0, x.size, chunk)]
    return part(np.concatenate(records)) if records else np.zeros(0, np.uint8)


def record(x: F32, k: int, chunk: int) -> U8:
    count, low_size = kept(x.size, k, chunk), low_bits(k, chunk)
    index = topk(x, count)
    entry = np.arange(count)
    upper, a, b = magnitudes(keys(x)[index])
    low, high, codes = (np.zeros(32 * size, np.bool_) for size in words(k, chunk)[:3])
    for bit in range(low_size):
        low[entry * low_size + bit] = index >> bit & 1
    high[(index >> low_size) + entry] = True
    codes[2 * entry] = upper
    codes[2 * entry + 1] = np.signbit(x[index])
    packed = np.packbits(np.concatenate([low, high, codes]), bitorder="little")
    return np.concatenate([packed, np.frombuffer(np.array([a, b], "<u2").tobytes(), np.uint8)])


def magnitudes(key: I64) -> tuple[Bits, int, int]:
    """Which of the kept keys have the magnitude b, and the bits of a and b."""
    finite = key < INFINITY
    field = np.maximum(1, key[finite] >> 23)
    mantissa = key[finite] % 2**23 + np.where(key[finite] >> 23 != 0, 2**23, 0)
    top = max([64, *field.tolist()])
    q = mantissa >> np.minimum(top - field, 31)
    if not finite.all():
        return ~finite, magnitude(q, top) if q.size else 0, NAN
    t = mean_of(q)
    for _ in range(4):
        u = mean_of(q[q <= t])
        v = mean_of(q[q > t]) if (q > t).any() else u
        t = (u + v) // 2
    upper = q > t
    a = magnitude(q[~upper], top)
    return upper, a, magnitude(q[upper], top) if upper.any() else a


def mean_of(q: I64) -> int:
    return int(q.sum()) // q.size


def magnitude(q: I64, top: int) -> int:
    """The bits of the bfloat16 next to the mean of some q, in units of 2^(top - 150)."""
    mean = np.float32(int(q.sum())) / np.float32(q.size)
    bits = int(np.ldexp(mean, top - 150).astype(np.float32).view(np.uint32))
    return min(GREATEST, bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def parsed(payload: U8, n: int, k: int, chunk: int) -> tuple[I64, F32]:
    """The indices of all entries in the vector, and their values.

    Raises:
        ValueError: the payload is damaged.
    """
    if payload.size != payload_size(n, k, chunk):
        raise ValueError("the payload has another size")
    indices, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    size = 4 * sum(words(k, chunk))
    for number, start in enumerate(range(0, n, chunk)):
        index, value = parsed_record(payload[number * size :][:size], min(chunk, n - start), k, chunk)
        indices.append(start + index)
        values.append(value)
    return np.concatenate(indices), np.concatenate(values)


def parsed_record(raw: U8, m: int, k: int, chunk: int) -> tuple[I64, F32]:
    count, low_size = kept(m, k, chunk), low_bits(k, chunk)
    ends = 32 * np.cumsum(words(k, chunk)[:3])
    low, high, codes, _ = np.split(np.unpackbits(raw, bitorder="little"), ends)
    places = np.flatnonzero(high)
    if places.size != count:
        raise ValueError("the high part of a record has another number of set bits")
    digits = low[: k * low_size].reshape(k, low_size)[:count].astype(np.int64)
    index = (places - np.arange(count) << low_size) + digits @ (1 << np.arange(low_size))
    if (np.diff(index) <= 0).any() or index[-1] >= m:
        raise ValueError("the indices of a record do not ascend, or are beyond the chunk")
    a_and_b = raw[-4:].copy().view("<u2").astype(np.uint32) << 16
    upper, negative = codes[: 2 * count].reshape(count, 2).T
    bits = a_and_b[upper] ^ negative.astype(np.uint32) << 31
    return index, bits.view(np.float32)


def decode(payload: U8, n: int, k: int, chunk: int) -> F32:
    """Decodes a payload; raises ValueError if it is damaged."""
    index, values = parsed(payload, n, k, chunk)
    out = np.zeros(n, np.float32)
    out[index] += values
    return out


def entries(payload: U8, n: int, k: int, chunk: int) -> Bits:
    """True for each element that has an entry; raises ValueError if the payload is damaged."""
    out = np.zeros(n, np.bool_)
    out[parsed(payload, n, k, chunk)[0]] = True
    return out


def feedback(x: F32, residual: F32, k: int, chunk: int, beta: float = 1.0) -> tuple[U8, F32]:
    """The payload of a = beta * residual + x, and the new residual, which has nothing of elements that are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        a = np.float32(beta) * residual + x
        payload = encode(a, k, chunk)
        lost = np.where(entries(payload, a.size, k, chunk), a - decode(payload, a.size, k, chunk), a)
    return payload, np.where(np.isfinite(a), lost, np.float32(0))


def outer(start: F32, x: F32, residual: F32, beta: float, k: int, chunk: int) -> tuple[U8, F32]:
    """As `feedback`, of what has been subtracted from `start` to come to x."""
    with np.errstate(over="ignore", invalid="ignore"):
        d = start - x
    return feedback(d, residual, k, chunk, beta)


def mean(payloads: Sequence[U8], n: int, k: int, chunk: int, contributors: bool) -> F32:
    """The mean over the ranks that have an entry for an element, or over all ranks."""
    total, count = np.zeros(n, np.float32), np.zeros(n, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for payload in payloads:
            total += decode(payload, n, k, chunk)
            count += entries(payload, n, k, chunk)
        if contributors:
            return total / np.maximum(count, np.float32(1))
        return total * np.float32(1 / len(payloads))
