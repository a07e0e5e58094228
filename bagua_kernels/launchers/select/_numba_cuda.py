"""Selection in Numba-CUDA: a thread block takes a tile, a thread a run of it; a scan in shared memory orders the entries."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, array, compile_template, launching
from bagua_kernels.jit._numba_cuda_package import cuda
from bagua_kernels.launchers.select import CHUNK, ROUNDS, place_in_turn
from bagua_kernels.rules import selection

THREADS = 64
RUN = 16
TILE = THREADS * RUN


def sum_of(total, value):
    """The sum of two float32."""
    return total + value


def count_kernel(x, counts, threshold):
    totals = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        totals[0] = 0
    cuda.syncthreads()
    start = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * RUN
    count = 0
    for i in range(start, min(start + RUN, x.size)):
        if magnitude_key(load(x[i])) >= threshold:
            count += 1
    if count > 0:
        cuda.atomic.add(totals, 0, count)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        counts[cuda.blockIdx.x] = totals[0]


def write_kernel(x, starts, offsets, values, threshold):
    counts = cuda.shared.array(THREADS, np.int32)
    lane = cuda.threadIdx.x
    start = (cuda.blockIdx.x * THREADS + lane) * RUN
    count = 0
    for i in range(start, min(start + RUN, x.size)):
        if magnitude_key(load(x[i])) >= threshold:
            count += 1
    counts[lane] = count
    cuda.syncthreads()
    to = starts[cuda.blockIdx.x]
    for other in range(lane):
        to += counts[other]
    for i in range(start, min(start + RUN, x.size)):
        value = load(x[i])
        if magnitude_key(value) >= threshold:
            offsets[to] = i % CHUNK
            values[to] = value
            to += 1


def place_kernel(ends, offsets, values, out, flags):
    chunk = cuda.blockIdx.x
    begin = np.int64(0)
    if chunk > 0:
        begin = np.int64(ends[chunk - 1])
    end = np.int64(ends[chunk])
    if begin > end or end > offsets.size:
        flags[0] = 1
        end = min(end, offsets.size)
    size = min(CHUNK, out.size - chunk * CHUNK)
    for i in range(begin + cuda.threadIdx.x, end, THREADS):
        offset = np.int64(offsets[i])
        if offset >= size or (i > begin and offset <= np.int64(offsets[i - 1])):
            flags[1] = 1
        elif ADD:
            out[chunk * CHUNK + offset] = sum_of(out[chunk * CHUNK + offset], values[i])
        else:
            out[chunk * CHUNK + offset] = values[i]


def permute_kernel(positions, keys, n, bits):
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if i < positions.size:
        mask = np.uint32((np.int64(1) << bits) - 1)
        index = np.int64(i)
        walking = True
        while walking:
            left = left_half(index, bits)
            right = right_half(index, mask)
            for r in range(ROUNDS):
                new = feistel_left(left, right, mask, keys[2 * r], keys[2 * r + 1])
                left = right
                right = new
            index = joined(left, right, bits)
            walking = index >= n
        positions[i] = index


TEMPLATES = {
    "count": count_kernel,
    "write": write_kernel,
    "place": place_kernel,
    "add": place_kernel,
    "permute": permute_kernel,
}


@functools.cache
def kernel(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The compiled kernel."""
    rules = (
        selection.magnitude_key,
        selection.feistel_left,
        selection.left_half,
        selection.right_half,
        selection.joined,
        sum_of,
    )
    numbers = {"THREADS": THREADS, "RUN": RUN, "CHUNK": CHUNK, "ROUNDS": ROUNDS, "ADD": name == "add"}
    return compile_template(TEMPLATES[name], {**numbers, **{f.__name__: f for f in rules}, "load": LOAD[dtype]})


def launch(name: str, dtype: torch.dtype, grid: int, *arguments: Any) -> None:
    """Launches thread blocks."""
    first = next(a for a in arguments if isinstance(a, torch.Tensor))
    with launching(first) as stream:
        arrays = [array(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        kernel(name, dtype)[grid, THREADS, stream](*arrays)


def collect(x: torch.Tensor, threshold: int, residual: torch.Tensor | None, expected: int) -> tuple[torch.Tensor, Any]:
    """The number of entries of each tile, and what `write` needs."""
    if residual is not None:
        x = residual.add_(x)
    counts = torch.empty(-(-x.numel() // TILE), dtype=torch.int64, device=x.device)
    launch("count", x.dtype, counts.numel(), x, counts, np.int32(threshold))
    return counts, (x, threshold)


def chunk_ends(ends: torch.Tensor, n: int) -> torch.Tensor:
    """The number of entries up to the end of each chunk, from those up to the end of each tile."""
    last = ends[-1:] if ends.numel() % (CHUNK // TILE) else ends[:0]
    return torch.cat([ends[CHUNK // TILE - 1 :: CHUNK // TILE], last])


def write(state: Any, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """See `bagua_kernels.launchers.select.Collected.write`."""
    x, threshold = state
    unsigned = offsets.view(torch.uint16)
    launch("write", x.dtype, starts.numel(), x, starts, unsigned, values, np.int32(threshold))


def place(
    ends: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    add: bool = False,
) -> None:
    """See `bagua_kernels.launchers.select.place`; or adds to what is there, in float32."""
    unsigned = ends.view(torch.uint32), offsets.view(torch.uint16)
    launch("add" if add else "place", torch.float32, ends.numel(), *unsigned, values, out, flags)


# See `bagua_kernels.launchers.select.place_sum`.
place_sum = functools.partial(place_in_turn, place)


def permute(positions: torch.Tensor, keys: torch.Tensor, n: int, bits: int) -> None:
    """See `bagua_kernels.launchers.select.permuted`."""
    grid = -(-positions.numel() // THREADS)
    launch("permute", torch.float32, grid, positions, keys.view(torch.uint32), n, bits)
