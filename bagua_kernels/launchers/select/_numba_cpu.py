"""Selection on the CPU: a task takes a chunk of 65,536 elements.

One pass over memory: each task compacts its chunk into its own scratch memory, and touches only the used part. The entries
are then copied together. 64 elements are compared with the threshold at once, and only the bits that
this leaves are looked at one by one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, array, compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import MASK_BITS, borrowed, lowest_bit, prefetch, reaching, wide_vectors
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run_all
from bagua_kernels.launchers.select import CHUNK, ROUNDS
from bagua_kernels.rules import selection

# Elements of a cache line, and how far ahead they are asked for.
LINE = 16
AHEAD = 1024


def append(x, first, threshold, offsets, values, count):
    """Appends the entries among a few elements as far as there is room, and returns the number of entries so far."""
    for i in range(x.size):
        value = load(x[i])
        if magnitude_key(value) >= threshold:
            if count < offsets.size:
                offsets[count] = np.uint16(first + i)
                values[count] = value
            count += 1
    return count


def append_marked(values_at, start, mask, offsets, values, count):
    """Appends the entries that a mask of 64 elements from `start` on marks, as far as there is room."""
    while mask != np.uint64(0):
        i = start + lowest_bit(mask)
        mask &= mask - np.uint64(1)
        if count < offsets.size:
            offsets[count] = np.uint16(i)
            values[count] = values_at[i]
        count += 1
    return count


def collect_chunk(x, threshold, offsets, values):
    wide_vectors()
    x, offsets, values = borrowed(x), borrowed(offsets), borrowed(values)
    count = 0
    whole = x.size // MASK_BITS * MASK_BITS
    for start in range(0, whole, MASK_BITS):
        for line in range(0, MASK_BITS, LINE):
            prefetch(x, start + AHEAD + line)
        if DIRECT:
            count = append_marked(x, start, reaching(x, start, threshold), offsets, values, count)
        else:
            top = np.int32(0)
            # A trip count that is known makes this loop a few vector instructions.
            for i in range(MASK_BITS):
                top = max(top, magnitude_key(load(x[start + i])))
            if top >= threshold:
                count = append(x[start : start + MASK_BITS], start, threshold, offsets, values, count)
    return append(x[whole:], whole, threshold, offsets, values, count)


def collect_sum_chunk(x, residual, threshold, offsets, values):
    """As `collect_chunk` of `residual + x`, which is left in `residual`."""
    wide_vectors()
    x, residual, offsets, values = borrowed(x), borrowed(residual), borrowed(offsets), borrowed(values)
    count = 0
    whole = x.size // MASK_BITS * MASK_BITS
    for start in range(0, whole, MASK_BITS):
        for line in range(0, MASK_BITS, LINE):
            prefetch(x, start + AHEAD + line)
            prefetch(residual, start + AHEAD + line)
        part = x[start : start + MASK_BITS]
        kept = residual[start : start + MASK_BITS]
        for i in range(MASK_BITS):
            kept[i] += load(part[i])
        count = append_marked(residual, start, reaching(residual, start, threshold), offsets, values, count)
    for i in range(whole, x.size):
        residual[i] += load(x[i])
    return append_sum(residual[whole:], whole, threshold, offsets, values, count)


def collect_chunks(x, threshold, offsets, values, counts, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    for c in range(begin, end):
        counts[c] = collect_chunk(x[c * CHUNK : (c + 1) * CHUNK], threshold, offsets[c], values[c])


def collect_sum_chunks(x, residual, threshold, offsets, values, counts, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    for c in range(begin, end):
        part, kept = x[c * CHUNK : (c + 1) * CHUNK], residual[c * CHUNK : (c + 1) * CHUNK]
        counts[c] = collect_sum_chunk(part, kept, threshold, offsets[c], values[c])


def write_chunks(
    x, threshold, counts, starts, scratch_offsets, scratch_values, offsets, values, begin, end, threads, launcher
):
    if shared(begin, end, threads, launcher):
        return
    for c in range(begin, end):
        start, count = starts[c], counts[c]
        to_offsets, to_values = offsets[start : start + count], values[start : start + count]
        if count <= scratch_offsets.shape[1]:
            for i in range(count):
                to_offsets[i], to_values[i] = scratch_offsets[c, i], scratch_values[c, i]
        else:
            append(x[c * CHUNK : (c + 1) * CHUNK], 0, threshold, to_offsets, to_values, 0)


def place_chunk(c, ends, offsets, values, target, flags):
    """Writes the entries of chunk `c`, or adds them, to the part of the output that `target` is."""
    offsets, values, target = borrowed(offsets), borrowed(values), borrowed(target)
    begin = np.int64(0)
    if c > 0:
        begin = np.int64(ends[c - 1])
    end = np.int64(ends[c])
    if begin > end or end > offsets.size:
        flags[0] = 1
        end = min(end, offsets.size)
    before = -1
    for i in range(begin, end):
        offset = np.int64(offsets[i])
        if offset <= before or offset >= target.size:
            flags[1] = 1
        else:
            if ADD:
                target[offset] += values[i]
            else:
                target[offset] = values[i]
            before = offset


def place_chunks(ends, offsets, values, out, flags, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    for c in range(begin, end):
        place_chunk(c, ends, offsets, values, out[c * CHUNK : (c + 1) * CHUNK], flags)


def place_sum_chunks(ends, offsets, values, out, scale, flags, begin, end, threads, launcher):
    """A chunk is filled with zeros, added to and scaled while it is in the cache, so that memory is written once."""
    if shared(begin, end, threads, launcher):
        return
    for c in range(begin, end):
        target = out[c * CHUNK : (c + 1) * CHUNK]
        target[:] = 0
        for row in range(ends.shape[0]):
            place_chunk(c, ends[row], offsets[row], values[row], target, flags)
        for i in range(target.size):
            target[i] *= scale


def permute_range(positions, keys, n, bits, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    mask = np.uint32((np.int64(1) << bits) - 1)
    for i in range(begin, end):
        index = np.int64(i)
        while True:
            left = left_half(index, bits)
            right = right_half(index, mask)
            for r in range(ROUNDS):
                new = feistel_left(left, right, mask, keys[2 * r], keys[2 * r + 1])
                left = right
                right = new
            index = joined(left, right, bits)
            if index < n:
                break
        positions[i] = index


@functools.cache
def collect_kernel(name: str, dtype: torch.dtype) -> Any:
    """A compiled kernel that searches a vector of a dtype: collect, collect_sum, or write."""
    names: dict[str, Any] = {"LINE": LINE, "AHEAD": AHEAD, "DIRECT": dtype == torch.float32}
    names |= {"load": LOAD[dtype], "magnitude_key": selection.magnitude_key}
    names["append_marked"] = compile_template(append_marked, names, helper=True)
    if name == "write":
        inner = compile_template(append, names, helper=True)
        return compile_template(write_chunks, {"CHUNK": CHUNK, "append": inner})
    if name == "collect":
        inner = compile_template(
            collect_chunk, {**names, "append": compile_template(append, names, helper=True)}, helper=True
        )
        return compile_template(collect_chunks, {"CHUNK": CHUNK, "collect_chunk": inner})
    append_sum = compile_template(append, {**names, "load": LOAD[torch.float32]}, helper=True)
    inner = compile_template(collect_sum_chunk, {**names, "append_sum": append_sum}, helper=True)
    return compile_template(collect_sum_chunks, {"CHUNK": CHUNK, "collect_sum_chunk": inner})


@functools.cache
def kernel(name: str) -> Any:
    """Any other compiled kernel."""
    if name == "permute":
        rules = (selection.left_half, selection.right_half, selection.feistel_left, selection.joined)
        return compile_template(permute_range, {"ROUNDS": ROUNDS, **{f.__name__: f for f in rules}})
    inner = compile_template(place_chunk, {"ADD": name == "sum"}, helper=True)
    names = {"CHUNK": CHUNK, "place_chunk": inner}
    return compile_template(place_sum_chunks if name == "sum" else place_chunks, names)


def collect(x: torch.Tensor, threshold: int, residual: torch.Tensor | None, expected: int) -> tuple[torch.Tensor, Any]:
    """The number of entries of each chunk, and what `write` needs."""
    chunks = -(-x.numel() // CHUNK)
    counts = torch.empty(chunks, dtype=torch.int64)
    # A chunk with more entries than that is searched once more; memory for all of them would cost more than it saves.
    room = min(CHUNK, x.numel(), 2 * expected // chunks + 2 * MASK_BITS)
    scratch = np.empty((chunks, room), np.uint16), np.empty((chunks, room), np.float32)
    arguments = np.int32(threshold), *scratch, array(counts)
    if residual is None:
        run_all(collect_kernel("collect", x.dtype), (array(x), *arguments), chunks, x.numel())
        return counts, (x, np.int32(threshold), array(counts), *scratch)
    run_all(collect_kernel("collect_sum", x.dtype), (array(x), array(residual), *arguments), chunks, x.numel())
    return counts, (residual, np.int32(threshold), array(counts), *scratch)


def chunk_ends(ends: torch.Tensor, n: int) -> torch.Tensor:
    """The number of entries up to the end of each chunk: here, of each task."""
    return ends


def write(state: Any, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """See `bagua_kernels.launchers.select.Collected.write`."""
    x, threshold, counts, *scratch = state
    to = array(offsets.view(torch.uint16)), array(values)
    arguments = (array(x), threshold, counts, array(starts), *scratch, *to)
    run_all(collect_kernel("write", x.dtype), arguments, len(counts), x.numel())


def place(
    ends: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, out: torch.Tensor, flags: torch.Tensor
) -> None:
    """See `bagua_kernels.launchers.select.place`."""
    unsigned = array(ends.view(torch.uint32)), array(offsets.view(torch.uint16))
    arguments = (*unsigned, array(values), array(out), array(flags))
    run_all(kernel("place"), arguments, ends.numel(), out.numel())


def place_sum(
    ends: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    flags: torch.Tensor,
) -> None:
    """See `bagua_kernels.launchers.select.place_sum`."""
    unsigned = array(ends.view(torch.uint32)), array(offsets.view(torch.uint16))
    arguments = (*unsigned, array(values), array(out), np.float32(scale), array(flags))
    run_all(kernel("sum"), arguments, ends.shape[1], out.numel())


def permute(positions: torch.Tensor, keys: torch.Tensor, n: int, bits: int) -> None:
    """See `bagua_kernels.launchers.select.permuted`."""
    arguments = (array(positions), array(keys.view(torch.uint32)), n, bits)
    run_all(kernel("permute"), arguments, positions.numel(), positions.numel())
