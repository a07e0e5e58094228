"""Chunked top-k on the CPU: a chunk stays in the first cache from its values to its record.

Chunks are taken one after the other, because the threshold of one is a good guess for the next one's.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import MASK_BITS, borrowed, keep, wide_vectors
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run_all
from bagua_kernels.launchers.chunks import INFINITE, Record
from bagua_kernels.launchers.chunks import _numba_cpu_search as search
from bagua_kernels.rules import two_magnitudes
from bagua_kernels.rules.rounding import float_bits
from bagua_kernels.rules.selection import magnitude_key

# The key of 1, as a guess for the first chunk of a thread.
FIRST = 0x3F800000


def small_part(steps, middle):
    """The sum and the number of those of up to `middle` steps."""
    total, count = np.int64(0), np.int64(0)
    for i in range(steps.size):
        inside = steps[i] <= middle
        total += np.int64(steps[i] if inside else np.int32(0))
        count += inside
    return total, count


def divide(kept, steps):
    """Writes the steps of the kept values, and divides small from large ones.

    Returns:
        The greatest number of steps of small ones, the word of both magnitudes, and True if all values are finite. Values that
        are not finite are large ones.
    """
    wide_vectors()
    top, greatest = np.int32(0), np.int32(0)
    for i in range(kept.size):
        key = magnitude_key(kept[i])
        top = max(top, key)
        greatest = max(greatest, key if key < INFINITE else np.int32(0))
    finite = top < INFINITE
    greatest = max(field(greatest), np.int32(LEAST_FIELD))
    for i in range(kept.size):
        key = magnitude_key(kept[i])
        steps[i] = steps_of(key, greatest) if key < INFINITE else np.int32(EVERY + 1)
    total, few = small_part(steps, np.int32(EVERY))
    small, middle = total, np.int32(EVERY)
    if finite:
        middle = np.int32(total // few)
        for turn in range(5):
            small, few = small_part(steps, middle)
            if turn < 4:
                lower = small // few
                upper = lower
                if few < steps.size:
                    upper = (total - small) // (steps.size - few)
                middle = np.int32((lower + upper) // 2)
    a = magnitude_bits(small, few, greatest)
    b = a
    if not finite:
        b = np.int32(0x7FC0)
    elif few < steps.size:
        b = magnitude_bits(total - small, steps.size - few, greatest)
    return middle, np.int32((b << 16) | a), finite


def write_low(record, indices, low):
    """Writes the lower bits of all indices, one after the other."""
    word, gathered, held = 0, np.uint64(0), np.uint64(0)
    for j in range(indices.size):
        gathered |= (np.uint64(indices[j]) & np.uint64((1 << low) - 1)) << held
        held += np.uint64(low)
        record[word] = np.int32(np.uint32(gathered & np.uint64(0xFFFFFFFF)))
        if held >= np.uint64(32):
            word += 1
            gathered >>= np.uint64(32)
            held -= np.uint64(32)
    if held > np.uint64(0):
        record[word] = np.int32(np.uint32(gathered & np.uint64(0xFFFFFFFF)))


def write_record(kept, indices, steps, middle, magnitudes, form, record, values):
    """Writes a record of a form, and subtracts its values from those of the chunk if these are a residual."""
    low, high_at, codes_at, magnitudes_at = form
    record[:] = 0
    if low > 0:
        write_low(record, indices, low)
    for j in range(kept.size):
        bit = (indices[j] >> low) + j
        record[high_at + (bit >> 5)] |= np.int32(1 << (bit & 31))
        code = np.int32(steps[j] > middle)
        if float_bits(kept[j]) < 0:
            code |= np.int32(2)
        record[codes_at + (j >> 4)] |= np.int32(code << (2 * (j & 15)))
        if WITH_RESIDUAL:
            values[indices[j]] = kept[j] - magnitude_value(code, magnitudes)
    record[magnitudes_at] = magnitudes


def encode_chunks(x, start, residual, beta, k, last, chunk, form, records, begin, end, threads, launcher):
    """Encodes the chunks from `begin` up to `end`."""
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    x, start, residual, records = borrowed(x), borrowed(start), borrowed(residual), borrowed(records)
    # More than a chunk, up to a whole number of masks.
    own = np.empty((7, chunk + MASK_BITS), np.float32)
    scratch = borrowed(own)
    integers = scratch[3:].view(np.int32)
    found, places, masks = scratch[1], integers[0], scratch[6].view(np.uint64)
    guess = np.int64(FIRST)
    for c in range(begin, end):
        first, beyond = c * chunk, min((c + 1) * chunk, x.size)
        part = x[first:beyond]
        values = residual[first:beyond] if WITH_RESIDUAL else scratch[0][: part.size]
        if WITH_START:
            before = start[first:beyond]
            for i in range(part.size):
                values[i] = beta * values[i] + (load(store(before[i])) - load(part[i]))
        else:
            for i in range(part.size):
                if WITH_RESIDUAL:
                    values[i] = beta * values[i] + load(part[i])
                else:
                    values[i] = load(part[i])
        count = k
        if c == records.shape[0] - 1:
            count = last
        kept, indices, steps = scratch[2], integers[1], integers[2][:count]
        threshold = choose(values, count, guess, masks, found, places, kept, indices)
        guess = max(threshold - STEP, 0)
        kept, indices = kept[:count], indices[:count]
        middle, magnitudes, finite = divide(kept, steps)
        write_record(kept, indices, steps, middle, magnitudes, form, records[c], values)
        if WITH_RESIDUAL and not finite:
            for i in range(values.size):
                if magnitude_key(values[i]) >= INFINITE:
                    values[i] = 0.0
    keep(own)


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


def decode_chunks(records, out, scale, k, last, chunk, form, flags, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    records, out, flags = borrowed(records), borrowed(out), borrowed(flags)
    for c in range(begin, end):
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


NUMBERS = {"INFINITE": INFINITE, "LEAST_FIELD": two_magnitudes.LEAST_FIELD, "EVERY": two_magnitudes.EVERY}


def form_of(record: Record) -> tuple[int, int, int, int]:
    """The lower bits of an index, and where the parts of a record begin."""
    return (record.low_bits, *record.starts)


@functools.cache
def encode_kernel(dtype: torch.dtype, with_residual: bool, with_start: bool) -> Any:
    """The kernel that encodes a vector, what a residual lacks, or a difference."""
    names: dict[str, Any] = {**RULES, **NUMBERS, "load": LOAD[dtype], "store": STORE[dtype]}
    names |= {"WITH_RESIDUAL": with_residual, "WITH_START": with_start, "STEP": search.STEP}
    searching = (search.mark, search.threshold_of, search.gather, search.raised, search.choose)
    for helper in (*searching, small_part, divide, write_low, write_record):
        names[helper.__name__] = compile_template(helper, names, helper=True)
    return compile_template(encode_chunks, names)


@functools.cache
def decode_kernel(counted: bool) -> Any:
    """The kernel that decodes, and counts contributors or does not."""
    names: dict[str, Any] = {**RULES, **NUMBERS, "COUNTED": counted}
    for helper in (read_bits, add_record, decode_chunk):
        names[helper.__name__] = compile_template(helper, names, helper=True)
    return compile_template(decode_chunks, names)


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
    kernel = encode_kernel(x.dtype, residual is not None, start is not None)
    form = (record.k, record.kept_in_last(x.numel()), record.chunk, form_of(record))
    arguments = (array(x), *beside, np.float32(beta), *form, array(records))
    run_all(kernel, arguments, len(records), x.numel())


def decode_sum(
    records: torch.Tensor, out: torch.Tensor, record: Record, scale: float, contributors: bool, flags: torch.Tensor
) -> None:
    """See `bagua_kernels.launchers.chunks.decode_sum`."""
    form = (record.k, record.kept_in_last(out.numel()), record.chunk, form_of(record))
    arguments = (array(records), array(out), np.float32(scale), *form, array(flags))
    run_all(decode_kernel(contributors), arguments, records.shape[1], out.numel())
