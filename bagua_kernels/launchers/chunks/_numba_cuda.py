"""Chunked top-k in Numba-CUDA: a thread block takes a chunk, a thread a run of it; counts are added up in shared memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.jit._numba_cuda_package import cuda
from bagua_kernels.launchers.chunks import INFINITE, Record, add_in_turn
from bagua_kernels.rules import two_magnitudes
from bagua_kernels.rules.rounding import float_bits
from bagua_kernels.rules.selection import magnitude_key

THREADS = 32


def difference(x, y):
    """The difference of two float32."""
    return x - y


def decayed(residual, beta, x):
    """A factor times the residual, and a summand."""
    return residual * beta + x


def quotient(total, count):
    """The whole part of a mean of numbers that are not negative."""
    return total // count


def sum_of_first(room, value, threads):
    """The sum of a number of each of the first threads."""
    room[cuda.threadIdx.x] = value
    cuda.syncthreads()
    total = np.int64(0)
    for i in range(threads):
        total += room[i]
    cuda.syncthreads()
    return total


def greatest_of(room, value):
    """The greatest number of all threads."""
    room[cuda.threadIdx.x] = value
    cuda.syncthreads()
    found = room[0]
    for i in range(1, THREADS):
        found = max(found, room[i])
    cuda.syncthreads()
    return found


def set_bits(words, at, value, size):
    """Sets the bits of a value of `size` bits, from bit `at` of some words on."""
    word, shift = at >> 5, at & 31
    wide = np.uint64(value) << np.uint64(shift)
    cuda.atomic.or_(words, word, np.uint32(wide & np.uint64(0xFFFFFFFF)))
    if shift + size > 32:
        cuda.atomic.or_(words, word + 1, np.uint32(wide >> np.uint64(32)))


def encode_kernel(x, start, residual, records, beta, k, last):
    room = cuda.shared.array(THREADS, np.int64)
    keys = cuda.shared.array(CHUNK, np.int32)
    signs = cuda.shared.array(CHUNK, np.uint8)
    chunk, lane = cuda.blockIdx.x, cuda.threadIdx.x
    first = chunk * CHUNK
    size = min(CHUNK, x.size - first)
    begin, end = min(lane * RUN, size), min(lane * RUN + RUN, size)
    count = k
    if chunk == cuda.gridDim.x - 1:
        count = last
    for i in range(begin, end):
        value = load(x[first + i])
        if WITH_START:
            value = difference(load(store(start[first + i])), value)
        if WITH_RESIDUAL:
            value = decayed(residual[first + i], beta, value)
            residual[first + i] = value
        keys[i] = magnitude_key(value)
        signs[i] = float_bits(value) < 0
    threshold = 0
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        reached = 0
        for i in range(begin, end):
            reached += keys[i] >= candidate
        if sum_of_first(room, reached, THREADS) >= count:
            threshold = candidate
    above, equal = 0, 0
    for i in range(begin, end):
        above += keys[i] > threshold
        equal += keys[i] == threshold
    ties = count - sum_of_first(room, above, THREADS)
    first_tie = sum_of_first(room, equal, lane)
    # This thread's share of the ties that are kept.
    kept_ties = max(min(ties - first_tie, np.int64(equal)), np.int64(0))
    place = sum_of_first(room, above + kept_ties, lane)
    greatest, normals = np.int64(LEAST_FIELD), 0
    left = kept_ties
    for i in range(begin, end):
        key = keys[i]
        if key < threshold or (key == threshold and left == 0):
            # What is not kept counts no more.
            keys[i] = -1
            if WITH_RESIDUAL and key >= INFINITE:
                residual[first + i] = 0
        else:
            left -= key == threshold
            if key < INFINITE:
                greatest = max(greatest, np.int64(field(key)))
                normals += 1
    greatest = np.int32(greatest_of(room, greatest))
    normals = sum_of_first(room, normals, THREADS)
    finite = normals == count
    # At first all steps are small, so that their mean divides them next; the last turn is for the magnitudes.
    middle, total, small, few = np.int64(EVERY), np.int64(0), np.int64(0), np.int64(0)
    for turn in range(6):
        own_small, own_few = np.int64(0), 0
        for i in range(begin, end):
            if keys[i] >= 0 and keys[i] < INFINITE:
                steps = steps_of(keys[i], greatest)
                if steps <= middle:
                    own_small += steps
                    own_few += 1
        small, few = sum_of_first(room, own_small, THREADS), sum_of_first(room, own_few, THREADS)
        if turn == 0:
            total = small
        if turn < 5:
            lower = quotient(small, max(few, np.int64(1)))
            upper = lower
            if normals > few:
                upper = quotient(total - small, normals - few)
            middle = quotient(lower + upper, np.int64(2))
            if turn == 4 and not finite:
                middle = np.int64(EVERY)
    a = magnitude_bits(small, few, greatest)
    b = a
    if not finite:
        b = np.int32(0x7FC0)
    elif normals > few:
        b = magnitude_bits(total - small, normals - few, greatest)
    magnitudes = np.int32((np.int32(b) << 16) | np.int32(a))
    record = records[chunk]
    for i in range(begin, end):
        key = keys[i]
        if key >= 0:
            if LOW > 0:
                set_bits(record, place * LOW, i & ((1 << LOW) - 1), LOW)
            set_bits(record, 32 * HIGH_AT + (i >> LOW) + place, 1, 1)
            code = np.int32(signs[i]) << 1
            if key >= INFINITE or steps_of(key, greatest) > middle:
                code |= 1
            set_bits(record, 32 * CODES_AT + 2 * place, code, 2)
            place += 1
            if WITH_RESIDUAL:
                residual[first + i] = difference(residual[first + i], magnitude_value(np.int32(code), magnitudes))
                if key >= INFINITE:
                    residual[first + i] = 0
    if lane == 0:
        record[MAGNITUDES_AT] = np.uint32(magnitudes)


def read_bits(words, at, bits):
    """Up to 16 bits from bit `at` of some words on."""
    word, shift = at >> 5, at & 31
    wide = np.uint64(words[word])
    if shift + bits > 32:
        wide |= np.uint64(words[word + 1]) << np.uint64(32)
    return np.int64((wide >> np.uint64(shift)) & np.uint64((1 << bits) - 1))


def sum_of(total, value):
    """The sum of two float32."""
    return total + value


def add_kernel(record, out, senders, flags, k, last):
    """Adds the entries of one rank's record of a chunk: a thread takes a word of its high part at a time."""
    chunk, lane = cuda.blockIdx.x, cuda.threadIdx.x
    first = chunk * CHUNK
    size = min(CHUNK, out.size - first)
    count = k
    if chunk == cuda.gridDim.x - 1:
        count = last
    words = record[chunk]
    magnitudes = np.int32(words[MAGNITUDES_AT])
    for w in range(HIGH_AT + lane, CODES_AT, THREADS):
        place = np.int64(0)
        for other in range(HIGH_AT, w):
            for bit in range(32):
                place += (words[other] >> bit) & 1
        for bit in range(32):
            if (words[w] >> bit) & 1:
                if place >= count:
                    flags[0] = 1
                else:
                    index = (32 * (w - HIGH_AT) + bit - place) << LOW
                    if LOW > 0:
                        index |= read_bits(words, place * LOW, LOW)
                        # Of neighbours in the high part the upper bits are equal, and the lower ones ascend.
                        at = 32 * (w - HIGH_AT) + bit - 1
                        adjacent = at >= 0 and (words[HIGH_AT + (at >> 5)] >> (at & 31)) & 1
                        if adjacent and read_bits(words, (place - 1) * LOW, LOW) >= read_bits(words, place * LOW, LOW):
                            flags[0] = 1
                    if index >= size:
                        flags[0] = 1
                    else:
                        code = np.int32(read_bits(words, 32 * CODES_AT + 2 * place, 2))
                        out[first + index] = sum_of(out[first + index], magnitude_value(code, magnitudes))
                        if COUNTED:
                            senders[first + index] += 1
                place += 1
        if w == CODES_AT - 1 and place != count:
            flags[0] = 1


@functools.cache
def kernel(name: str, record: Record, dtype: torch.dtype, *switches: bool) -> Any:
    """The compiled kernel of a form."""
    high, codes, magnitudes = record.starts
    numbers = {"THREADS": THREADS, "CHUNK": record.chunk, "RUN": -(-record.chunk // THREADS), "LOW": record.low_bits}
    numbers |= {"HIGH_AT": high, "CODES_AT": codes, "MAGNITUDES_AT": magnitudes, "INFINITE": INFINITE}
    numbers |= {"LEAST_FIELD": two_magnitudes.LEAST_FIELD, "EVERY": two_magnitudes.EVERY}
    rules = (
        two_magnitudes.field,
        two_magnitudes.steps_of,
        two_magnitudes.magnitude_bits,
        two_magnitudes.magnitude_value,
        magnitude_key,
        float_bits,
        difference,
        decayed,
        sum_of,
    )
    names: dict[str, Any] = {**numbers, **{f.__name__: f for f in rules}, "load": LOAD[dtype], "store": STORE[dtype]}
    for helper in (quotient, sum_of_first, greatest_of, set_bits, read_bits):
        names[helper.__name__] = compile_template(helper, numbers, device=True)
    if name == "encode":
        names |= {"WITH_RESIDUAL": switches[0], "WITH_START": switches[1]}
        return compile_template(encode_kernel, names)
    return compile_template(add_kernel, names | {"COUNTED": switches[0]})


def encode(
    x: torch.Tensor,
    records: torch.Tensor,
    record: Record,
    residual: torch.Tensor | None,
    start: torch.Tensor | None,
    beta: float,
) -> None:
    """See `bagua_kernels.launchers.chunks.encode`."""
    run = kernel("encode", record, x.dtype, residual is not None, start is not None)
    nothing = x.new_empty(1, dtype=torch.float32)
    others = (array(nothing if each is None else each) for each in (start, residual))
    with launching(x) as stream:
        records.zero_()
        last = record.kept_in_last(x.numel())
        arguments = (array(x), *others, array(records.view(torch.uint32)), np.float32(beta), record.k, last)
        run[len(records), THREADS, stream](*arguments)


def add(
    row: torch.Tensor, out: torch.Tensor, record: Record, senders: torch.Tensor | None, flags: torch.Tensor
) -> None:
    """Adds the records of one rank to `out`, and counts their entries if there are `senders`."""
    run = kernel("add", record, torch.float32, senders is not None)
    with launching(out) as stream:
        arrays = (row.view(torch.uint32), out, flags if senders is None else senders, flags)
        run[len(row), THREADS, stream](*map(array, arrays), record.k, record.kept_in_last(out.numel()))


# See `bagua_kernels.launchers.chunks.decode_sum`.
decode_sum = functools.partial(add_in_turn, add)
