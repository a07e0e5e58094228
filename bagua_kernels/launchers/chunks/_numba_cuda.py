"""Chunked top-k in Numba-CUDA: a thread block takes a chunk, a thread a run of it; counts are added up in shared memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import cuda

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.launchers.chunks import INFINITE, Record
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


def total_of(room, value):
    """The sum of a number of each thread."""
    lane = cuda.threadIdx.x
    room[lane] = value
    cuda.syncthreads()
    total = np.int64(0)
    for i in range(THREADS):
        total += room[i]
    cuda.syncthreads()
    return total


def greatest_of(room, value):
    """The greatest number of all threads."""
    lane = cuda.threadIdx.x
    room[lane] = value
    cuda.syncthreads()
    found = room[0]
    for i in range(1, THREADS):
        found = max(found, room[i])
    cuda.syncthreads()
    return found


def before_of(room, value):
    """The sum of a number of each thread before this one."""
    lane = cuda.threadIdx.x
    room[lane] = value
    cuda.syncthreads()
    total = np.int64(0)
    for i in range(lane):
        total += room[i]
    cuda.syncthreads()
    return total


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
        if total_of(room, reached) >= count:
            threshold = candidate
    above, equal = 0, 0
    for i in range(begin, end):
        above += keys[i] > threshold
        equal += keys[i] == threshold
    ties = count - total_of(room, above)
    first_tie = before_of(room, equal)
    # This thread's share of the ties that are kept.
    kept_ties = max(min(ties - first_tie, np.int64(equal)), np.int64(0))
    place = before_of(room, above + kept_ties)
    greatest, normals, total = np.int64(LEAST_FIELD), 0, np.int64(0)
    left = kept_ties
    for i in range(begin, end):
        key = keys[i]
        if key > threshold or (key == threshold and left > 0):
            if key == threshold:
                left -= 1
            if key < INFINITE:
                greatest = max(greatest, np.int64(field(key)))
                normals += 1
    greatest = np.int32(greatest_of(room, greatest))
    left = kept_ties
    for i in range(begin, end):
        key = keys[i]
        if key > threshold or (key == threshold and left > 0):
            if key == threshold:
                left -= 1
            if key < INFINITE:
                total += steps_of(key, greatest)
    normals = total_of(room, normals)
    total = total_of(room, total)
    finite = normals == count
    middle = quotient(total, max(normals, np.int64(1)))
    small, few = np.int64(0), np.int64(0)
    for turn in range(5):
        own_small, own_few = np.int64(0), 0
        left = kept_ties
        for i in range(begin, end):
            key = keys[i]
            if key > threshold or (key == threshold and left > 0):
                if key == threshold:
                    left -= 1
                if key < INFINITE:
                    steps = steps_of(key, greatest)
                    if steps <= middle or (turn == 4 and not finite):
                        own_small += steps
                        own_few += 1
        small, few = total_of(room, own_small), total_of(room, own_few)
        if turn < 4:
            lower = quotient(small, max(few, np.int64(1)))
            upper = lower
            if normals > few:
                upper = quotient(total - small, normals - few)
            middle = quotient(lower + upper, np.int64(2))
    a = magnitude_bits(small, few, greatest)
    b = a
    if not finite:
        b = np.int32(0x7FC0)
    elif normals > few:
        b = magnitude_bits(total - small, normals - few, greatest)
    magnitudes = np.int32((np.int32(b) << 16) | np.int32(a))
    record = records[chunk]
    left = kept_ties
    for i in range(begin, end):
        key = keys[i]
        if key > threshold or (key == threshold and left > 0):
            if key == threshold:
                left -= 1
            if LOW > 0:
                set_bits(record, place * LOW, i & ((1 << LOW) - 1), LOW)
            set_bits(record, 32 * HIGH_AT + (i >> LOW) + place, 1, 1)
            code = np.int32(signs[i]) << 1
            if key >= INFINITE or (finite and steps_of(key, greatest) > middle):
                code |= 1
            set_bits(record, 32 * CODES_AT + 2 * place, code, 2)
            place += 1
            if WITH_RESIDUAL:
                residual[first + i] = difference(residual[first + i], magnitude_value(np.int32(code), magnitudes))
        if WITH_RESIDUAL and key >= INFINITE:
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
    numbers |= {"LEAST_FIELD": two_magnitudes.LEAST_FIELD}
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
    for helper in (quotient, total_of, greatest_of, before_of, set_bits, read_bits):
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


def decode_sum(
    records: torch.Tensor, out: torch.Tensor, record: Record, scale: float, contributors: bool, flags: torch.Tensor
) -> None:
    """See `bagua_kernels.launchers.chunks.decode_sum`."""
    run = kernel("add", record, torch.float32, contributors)
    last = record.kept_in_last(out.numel())
    with launching(out) as stream:
        out.zero_()
        senders = torch.zeros_like(out, dtype=torch.int32) if contributors else flags
        for row in records:
            arrays = (array(row.view(torch.uint32)), array(out), array(senders), array(flags))
            run[len(row), THREADS, stream](*arrays, record.k, last)
        if contributors:
            out.div_(senders.clamp_(min=1))
        else:
            out.mul_(scale)
