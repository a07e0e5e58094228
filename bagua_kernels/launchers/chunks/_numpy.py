"""Chunked top-k in NumPy: a matrix with a row per chunk, and the bits of records as a matrix of zeros and ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numpy import LOAD, STORE, array, load, meant, plain
from bagua_kernels.launchers.chunks import INFINITE, Record, add_in_turn
from bagua_kernels.rules.selection import magnitude_key
from bagua_kernels.rules.two_magnitudes import EVERY, LEAST_FIELD, field, magnitude_bits, magnitude_value, steps_of


def largest(values: Any, k: int) -> Any:
    """The ascending indices of the k largest elements of each row, of equal ones those of lowest index."""
    order = np.argsort(-plain(magnitude_key)(values), axis=1, kind="stable")
    return np.sort(order[:, :k], axis=1)


def divided(keys: Any) -> tuple[Any, Any]:
    """Divides the kept values of each row into small and large ones, in whole numbers of steps; see the wire format.

    Returns:
        True for each large value, and the word of both magnitudes.
    """
    finite = keys < INFINITE
    every = finite.all(1, keepdims=True)
    greatest = np.maximum(plain(field)(np.where(finite, keys, 0).max(1, keepdims=True)), np.int32(LEAST_FIELD))
    steps = np.where(finite, plain(steps_of)(keys, greatest), EVERY + 1).astype(np.int64)

    def sums(where: Any) -> tuple[Any, Any]:
        return np.where(where, steps, 0).sum(1, keepdims=True), where.sum(1, keepdims=True)

    total, normals = sums(finite)
    middle = total // np.maximum(normals, 1)
    for _ in range(4):
        small, few = sums(steps <= middle)
        lower = small // np.maximum(few, 1)
        upper = np.where(normals > few, (total - small) // np.maximum(normals - few, 1), lower)
        middle = (lower + upper) // 2
    # Beside values that are not finite, which are large, all others are small.
    middle = np.where(every, middle, EVERY)
    small, few = sums(steps <= middle)
    a = plain(magnitude_bits)(small, few, greatest)
    b = plain(magnitude_bits)(total - small, normals - few, greatest)
    b = np.where(every, np.where(normals > few, b, a), 0x7FC0)
    return steps > middle, ((b << 16) | a).astype(np.int32)


def binary(numbers: Any, size: int) -> Any:
    """The lowest bits of each number, one after the other, as rows of zeros and ones."""
    return (numbers[:, :, None] >> np.arange(size) & 1).reshape(len(numbers), -1)


def words_of(bits: Any) -> Any:
    """Rows of zeros and ones as rows of int32 words, the first one in the lowest bit; filled up with zeros."""
    filled = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), np.uint8)
    filled[:, : bits.shape[1]] = bits
    return np.packbits(filled, axis=1, bitorder="little").view("<i4")


def bits_of(words: Any) -> Any:
    """Rows of words as rows of zeros and ones, 32 per word."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")


def encode_chunks(values: Any, k: int, records: Any, record: Record, residual: Any) -> None:
    """Encodes rows of equally many elements, of which each keeps k."""
    index = largest(values, k)
    kept = np.take_along_axis(values, index, 1)
    keys = plain(magnitude_key)(kept)
    large, magnitudes = divided(keys)
    code = large + 2 * np.signbit(kept).astype(np.int32)
    sizes = record.k * record.low_bits, record.high_bits, 2 * record.k
    low, high, codes = (np.zeros((len(values), size), np.uint8) for size in sizes)
    low[:, : k * record.low_bits] = binary(index, record.low_bits)
    np.put_along_axis(high, (index >> record.low_bits) + np.arange(k), 1, axis=1)
    codes[:, : 2 * k] = binary(code, 2)
    records[:] = np.concatenate([words_of(low), words_of(high), words_of(codes), magnitudes], axis=1)
    if residual is not None:
        lacking = values.copy()
        np.put_along_axis(lacking, index, kept - plain(magnitude_value)(code, magnitudes), 1)
        residual[:] = np.where(plain(magnitude_key)(values) < INFINITE, lacking, 0)


@meant
def encode(
    x: torch.Tensor,
    records: torch.Tensor,
    record: Record,
    residual: torch.Tensor | None,
    start: torch.Tensor | None,
    beta: float,
) -> None:
    """See `bagua_kernels.launchers.chunks.encode`."""
    values = load(x)
    if start is not None:
        rounded = plain(STORE[x.dtype])(array(start))
        values = plain(LOAD[x.dtype])(rounded) - values
    if residual is not None:
        values = load(residual) * np.float32(beta) + values
    last = len(records) - 1
    for begin, end, k in ((0, last, record.k), (last, last + 1, record.kept_in_last(x.numel()))):
        if begin < end:
            part, shape = slice(begin * record.chunk, end * record.chunk), (end - begin, -1)
            kept = None if residual is None else array(residual)[part].reshape(shape)
            encode_chunks(values[part].reshape(shape), k, array(records)[begin:end], record, kept)


@meant
def add(
    row: torch.Tensor, out: torch.Tensor, record: Record, senders: torch.Tensor | None, flags: torch.Tensor
) -> None:
    """Adds the records of one rank to `out`, and counts their entries if there are `senders`."""
    high_at, codes_at, magnitudes_at = record.starts
    words = array(row)
    kept = np.full(len(words), record.k)
    kept[-1] = record.kept_in_last(out.numel())
    parts = np.split(words, [high_at, codes_at, magnitudes_at], axis=1)
    low, high, codes = map(bits_of, parts[:3])
    if not np.array_equal(high.sum(1, dtype=np.int64), kept):
        array(flags)[0] = 1
        return
    chunk, at = np.nonzero(high)
    place = np.arange(at.size) - np.repeat(np.cumsum(kept) - kept, kept)
    index = (at - place) << record.low_bits
    for bit in range(record.low_bits):
        index |= low[chunk, place * record.low_bits + bit].astype(np.int64) << bit
    position = chunk * record.chunk + index
    if (np.diff(position) <= 0).any() or (index >= record.chunk).any() or position[-1] >= out.numel():
        array(flags)[0] = 1
        return
    code = codes[chunk, 2 * place].astype(np.int32) + 2 * codes[chunk, 2 * place + 1].astype(np.int32)
    array(out)[position] += plain(magnitude_value)(code, words[chunk, magnitudes_at])
    if senders is not None:
        array(senders)[position] += 1


# See `bagua_kernels.launchers.chunks.decode_sum`.
decode_sum = functools.partial(add_in_turn, add)
