"""Chunked top-k on the CPU: a task takes a chunk, which stays in the first cache from its values to its record.

With a sample most keys need not be looked at twice. Among the others the k-th largest is found by a histogram of their upper 11
bits. Then its lower bits follow from the keys of its bin.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template, run
from bagua_kernels.launchers.chunks import INFINITE, Record
from bagua_kernels.rules import two_magnitudes
from bagua_kernels.rules.rounding import float_bits
from bagua_kernels.rules.selection import magnitude_key

SHIFT = 20
BINS = 2048
# A sample has every eighth key.
STRIDE = 8


def sampled_threshold(keys, k, bins):
    """A key that a little more than k keys reach, by a sample: no more than a hint."""
    bins[:] = 0
    top = 0
    for i in range(0, keys.size, STRIDE):
        place = keys[i] >> SHIFT
        bins[place] += 1
        top = max(top, place)
    wanted, above = k // STRIDE + k // (2 * STRIDE) + 4, 0
    while top > 0 and above + bins[top] < wanted:
        above += bins[top]
        top -= 1
    return top << SHIFT


def threshold_of(keys, k, bins, inside):
    """The k-th largest key. `bins` and `inside` are room for a histogram and for the keys of one bin."""
    bins[:] = 0
    place, above = 0, 0
    for i in range(keys.size):
        at = keys[i] >> SHIFT
        bins[at] += 1
        place = max(place, at)
    while above + bins[place] < k:
        above += bins[place]
        place -= 1
    count = 0
    for i in range(keys.size):
        if keys[i] >> SHIFT == place:
            inside[count] = keys[i]
            count += 1
    found = place << SHIFT
    for bit in range(SHIFT - 1, -1, -1):
        candidate = found | (1 << bit)
        reached = 0
        for i in range(count):
            reached += inside[i] >= candidate
        if above + reached >= k:
            found = candidate
    return found


def divided(keys, greatest, middle):
    """The sums and the numbers of the finite magnitudes of up to `middle` steps, and of those of more."""
    small, few, large, many = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for i in range(keys.size):
        if keys[i] < INFINITE:
            steps = np.int64(steps_of(keys[i], greatest))
            if steps <= middle:
                small += steps
                few += 1
            else:
                large += steps
                many += 1
    return small, few, large, many


def middle_of(keys, greatest):
    """The number of steps that divides small from large finite magnitudes: their mean, after four moves."""
    middle = np.int64(EVERY)
    for _ in range(5):
        small, few, large, many = divided(keys, greatest, middle)
        lower = small // max(few, 1)
        upper = lower
        if many > 0:
            upper = large // many
        middle = (lower + upper) // 2
    return middle


def set_bits(words, at, value):
    """Sets the bits of a value, of up to 16 bits, from bit `at` of some words on."""
    word, shift = at >> 5, at & 31
    wide = np.uint64(value) << np.uint64(shift)
    words[word] |= np.int32(np.uint32(wide & np.uint64(0xFFFFFFFF)))
    if shift > 16:
        rest = np.uint32(wide >> np.uint64(32))
        if rest:
            words[word + 1] |= np.int32(rest)


def write_record(values, k, form, record, keys, found, places, bins, inside, indices, kept):
    """Writes the record of a chunk of a form. All other arguments are room.

    Returns:
        The word of both magnitudes, and True if all elements are finite.
    """
    for i in range(values.size):
        keys[i] = magnitude_key(values[i])
    hint = sampled_threshold(keys, k, bins)
    candidates = 0
    for i in range(keys.size):
        found[candidates] = keys[i]
        places[candidates] = i
        candidates += keys[i] >= hint
    if candidates < k:
        candidates = keys.size
        for i in range(keys.size):
            found[i] = keys[i]
            places[i] = i
    found = found[:candidates]
    threshold = threshold_of(found, k, bins, inside)
    ties = k
    for i in range(candidates):
        ties -= found[i] > threshold
    count, greatest, top = 0, np.int32(LEAST_FIELD), np.int32(0)
    for i in range(candidates):
        key = found[i]
        if key >= threshold:
            if key == threshold:
                if ties == 0:
                    continue
                ties -= 1
            indices[count] = places[i]
            kept[count] = key
            count += 1
            top = max(top, key)
            if key < INFINITE:
                greatest = max(greatest, field(key))
    kept = kept[:k]
    finite = top < INFINITE
    middle = np.int64(EVERY)
    if finite:
        middle = middle_of(kept, greatest)
    small, few, large, many = divided(kept, greatest, middle)
    a = magnitude_bits(small, few, greatest)
    b = a
    if not finite:
        b = np.int32(0x7FC0)
    elif many > 0:
        b = magnitude_bits(large, many, greatest)
    magnitudes = np.int32((b << 16) | a)
    low, high_at, codes_at, magnitudes_at = form
    record[:] = 0
    for j in range(k):
        index = indices[j]
        if low > 0:
            set_bits(record, j * low, index & ((1 << low) - 1))
        set_bits(record, 32 * high_at + (index >> low) + j, 1)
        code = 0
        if kept[j] >= INFINITE or steps_of(kept[j], greatest) > middle:
            code = 1
        if float_bits(values[index]) < 0:
            code |= 2
        kept[j] = code
        set_bits(record, 32 * codes_at + 2 * j, code)
    record[magnitudes_at] = magnitudes
    return magnitudes, finite


def encode_chunk(x, start, residual, beta, k, form, record):
    values = np.empty(x.size, np.float32)
    keys, inside = np.empty(x.size, np.int32), np.empty(x.size, np.int32)
    found, places = np.empty(x.size + 1, np.int32), np.empty(x.size + 1, np.int32)
    bins, indices, kept = np.empty(BINS, np.int32), np.empty(k, np.int32), np.empty(k, np.int32)
    for i in range(x.size):
        if WITH_START:
            values[i] = beta * residual[i] + (load(store(start[i])) - load(x[i]))
        elif WITH_RESIDUAL:
            values[i] = beta * residual[i] + load(x[i])
        else:
            values[i] = load(x[i])
    magnitudes, finite = write_record(values, k, form, record, keys, found, places, bins, inside, indices, kept)
    if WITH_RESIDUAL:
        for i in range(x.size):
            residual[i] = values[i]
        for j in range(k):
            residual[indices[j]] -= magnitude_value(kept[j], magnitudes)
        if not finite:
            for i in range(x.size):
                if magnitude_key(values[i]) >= INFINITE:
                    residual[i] = 0.0


def encode_tasks(x, start, residual, beta, k, last, chunk, form, records):
    for c in numba.prange(records.shape[0]):
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        count = k
        if c == records.shape[0] - 1:
            count = last
        part = x[begin:end]
        if WITH_START:
            encode_chunk(part, start[begin:end], residual[begin:end], beta, count, form, records[c])
        elif WITH_RESIDUAL:
            encode_chunk(part, start, residual[begin:end], beta, count, form, records[c])
        else:
            encode_chunk(part, start, residual, beta, count, form, records[c])


def read_bits(words, at, bits):
    """Up to 16 bits from bit `at` of some words on."""
    word, shift = at >> 5, at & 31
    wide = np.uint64(np.uint32(words[word]))
    if shift + bits > 32:
        wide |= np.uint64(np.uint32(words[word + 1])) << np.uint64(32)
    return np.int64((wide >> np.uint64(shift)) & np.uint64((1 << bits) - 1))


def add_record(record, k, form, out, senders, flags):
    """Adds the entries of a record of a form to a chunk, and counts them."""
    low, high_at, codes_at, magnitudes_at = form
    magnitudes = record[magnitudes_at]
    count, before = 0, np.int64(-1)
    for w in range(high_at, codes_at):
        word = np.uint32(record[w])
        while word != 0:
            lowest = word & (~word + np.uint32(1))
            word ^= lowest
            bit = np.int64(32 * (w - high_at))
            while lowest > 1:
                lowest >>= np.uint32(1)
                bit += 1
            if count >= k:
                flags[0] = 1
                return
            index = (bit - count) << low
            if low > 0:
                index |= read_bits(record, count * low, low)
            if index <= before or index >= out.size:
                flags[0] = 1
                return
            code = np.int32(read_bits(record, 32 * codes_at + 2 * count, 2))
            out[index] += magnitude_value(code, magnitudes)
            if COUNTED:
                senders[index] += 1
            before = index
            count += 1
    if count < k:
        flags[0] = 1


def decode_chunk(records, c, k, form, out, scale, flags):
    senders = np.zeros(out.size if COUNTED else 1, np.int32)
    out[:] = 0
    for rank in range(records.shape[0]):
        add_record(records[rank, c], k, form, out, senders, flags)
    for i in range(out.size):
        if COUNTED:
            out[i] = out[i] / np.float32(max(senders[i], 1))
        else:
            out[i] *= scale


def decode_tasks(records, out, scale, k, last, chunk, form, flags):
    for c in numba.prange(records.shape[1]):
        count = k
        if c == records.shape[1] - 1:
            count = last
        decode_chunk(records, c, count, form, out[c * chunk : (c + 1) * chunk], scale, flags)


RULES = {
    f.__name__: f
    for f in (
        two_magnitudes.field,
        two_magnitudes.steps_of,
        two_magnitudes.magnitude_bits,
        two_magnitudes.magnitude_value,
        magnitude_key,
        float_bits,
    )
}


NUMBERS = {
    **{"SHIFT": SHIFT, "BINS": BINS, "STRIDE": STRIDE, "INFINITE": INFINITE},
    **{"LEAST_FIELD": two_magnitudes.LEAST_FIELD, "EVERY": two_magnitudes.EVERY},
}


def form_of(record: Record) -> tuple[int, int, int, int]:
    """The lower bits of an index, and where the parts of a record begin."""
    return (record.low_bits, *record.starts)


@functools.cache
def encode_kernel(dtype: torch.dtype, with_residual: bool, with_start: bool, parallel: bool) -> Any:
    """The compiled kernel of what it encodes."""
    names: dict[str, Any] = {**RULES, **NUMBERS, "load": LOAD[dtype], "store": STORE[dtype]}
    names |= {"WITH_RESIDUAL": with_residual, "WITH_START": with_start, "PARALLEL": parallel}
    for helper in (sampled_threshold, threshold_of, divided, middle_of, set_bits, write_record, encode_chunk):
        names[helper.__name__] = compile_template(helper, names, helper=True)
    return compile_template(encode_tasks, names, parallel=parallel)


@functools.cache
def decode_kernel(counted: bool, parallel: bool) -> Any:
    """The compiled kernel, which counts contributors or does not."""
    names: dict[str, Any] = {**RULES, **NUMBERS, "COUNTED": counted, "PARALLEL": parallel}
    for helper in (read_bits, add_record, decode_chunk):
        names[helper.__name__] = compile_template(helper, names, helper=True)
    return compile_template(decode_tasks, names, parallel=parallel)


def encode(
    x: torch.Tensor,
    records: torch.Tensor,
    record: Record,
    residual: torch.Tensor | None,
    start: torch.Tensor | None,
    beta: float,
) -> None:
    """See `bagua_kernels.launchers.chunks.encode`."""
    nothing = np.empty(0, np.float32)
    beside = [nothing if each is None else array(each) for each in (start, residual)]
    make = functools.partial(encode_kernel, x.dtype, residual is not None, start is not None)
    form = (record.k, record.kept_in_last(x.numel()), record.chunk, form_of(record))
    run(x.numel(), make, array(x), *beside, np.float32(beta), *form, array(records))


def decode_sum(
    records: torch.Tensor, out: torch.Tensor, record: Record, scale: float, contributors: bool, flags: torch.Tensor
) -> None:
    """See `bagua_kernels.launchers.chunks.decode_sum`."""
    form = (record.k, record.kept_in_last(out.numel()), record.chunk, form_of(record))
    make = functools.partial(decode_kernel, contributors)
    run(out.numel(), make, array(records), array(out), np.float32(scale), *form, array(flags))
