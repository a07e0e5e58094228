"""Selection in Triton: a program takes a tile of elements, counts its entries, and writes them to places that a scan computes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, bits, compile_template, on_device
from bagua_kernels.launchers.select import CHUNK, ROUNDS, place_in_turn
from bagua_kernels.rules import rounding, selection

TILE = 4096
# Entries that a program of `place` takes at a time.
ENTRIES = 512
WARPS = 4


def count_kernel(x_ptr, counts_ptr, n, threshold, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = magnitude_key(load(tl.load(x_ptr + at, mask=at < n, other=0)))
    chosen = tl.cast((key >= threshold) & (at < n), tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.cast(tl.sum(chosen, axis=0), tl.int64))


def write_kernel(x_ptr, starts_ptr, offsets_ptr, values_ptr, n, threshold, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = load(tl.load(x_ptr + at, mask=at < n, other=0))
    chosen = (magnitude_key(value) >= threshold) & (at < n)
    rank = tl.cumsum(tl.cast(chosen, tl.int32), axis=0) - 1
    to = tl.load(starts_ptr + tl.program_id(0)) + rank
    tl.store(offsets_ptr + to, tl.cast(at % SPAN, tl.int16), mask=chosen)
    tl.store(values_ptr + to, value, mask=chosen)


def place_kernel(
    ends_ptr, offsets_ptr, values_ptr, out_ptr, flags_ptr, capacity, n,
    ADD: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.cast(tl.program_id(0), tl.int64)
    # Ends and offsets are unsigned in the payload.
    begin = tl.cast(tl.load(ends_ptr + chunk - 1, mask=chunk > 0, other=0), tl.int64) & 0xFFFFFFFF
    end = tl.cast(tl.load(ends_ptr + chunk), tl.int64) & 0xFFFFFFFF
    bad_end = (begin > end) | (end > capacity)
    tl.store(flags_ptr, 1, mask=bad_end)
    end = tl.minimum(end, capacity)
    size = tl.minimum(n - chunk * SPAN, SPAN)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        present = at < end
        offset = tl.cast(tl.load(offsets_ptr + at, mask=present, other=0), tl.int32) & 0xFFFF
        earlier = present & (at > begin)
        before = tl.cast(tl.load(offsets_ptr + at - 1, mask=earlier, other=0), tl.int32) & 0xFFFF
        bad = present & ((offset >= size) | (earlier & (offset <= before)))
        tl.store(flags_ptr + 1 + tl.zeros_like(offset), 1, mask=bad)
        good = present & ~bad
        value = tl.load(values_ptr + at, mask=good, other=0)
        to = out_ptr + chunk * SPAN + offset
        if ADD:
            value += tl.load(to, mask=good, other=0)
        tl.store(to, value, mask=good)


def permute_kernel(positions_ptr, keys_ptr, count, n, half, N_ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wide = tl.cast(half, tl.int64)
    mask = tl.cast((tl.full((), 1, tl.int64) << wide) - 1, tl.uint32)
    index = at
    pending = tl.cast(inside, tl.int32)
    while tl.max(pending, axis=0) > 0:
        left = left_half(index, wide)
        right = right_half(index, mask)
        for r in range(N_ROUNDS):
            key = tl.cast(tl.load(keys_ptr + 2 * r), tl.uint32, bitcast=True)
            second = tl.cast(tl.load(keys_ptr + 2 * r + 1), tl.uint32, bitcast=True)
            new = feistel_left(left, right, mask, key, second)
            left = right
            right = new
        index = tl.where(pending > 0, joined(left, right, wide), index)
        pending = tl.cast(inside & (index >= n), tl.int32)
    tl.store(positions_ptr + at, index, mask=inside)


TEMPLATES = {"count": count_kernel, "write": write_kernel, "place": place_kernel, "permute": permute_kernel}
UNSPECIALIZED = {
    "count": ("threshold",),
    "write": ("threshold",),
    "place": ("capacity",),
    "permute": ("count", "n", "half"),
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
        rounding.identity,
    )
    names = {**{f.__name__: f for f in rules}, "load": LOAD[dtype]}
    return compile_template(TEMPLATES[name], names, UNSPECIALIZED[name])


def collect(x: torch.Tensor, threshold: int, residual: torch.Tensor | None, expected: int) -> tuple[torch.Tensor, Any]:
    """The number of entries of each tile, and what `write` needs."""
    if residual is not None:
        x = residual.add_(x)
    tiles = triton.cdiv(x.numel(), TILE)
    counts = torch.empty(tiles, dtype=torch.int64, device=x.device)
    with on_device(x):
        run = kernel("count", x.dtype)
        run[(tiles,)](bits(x), counts, x.numel(), threshold, BLOCK=TILE, num_warps=WARPS, **EXACT)
    return counts, (x, threshold)


def chunk_ends(ends: torch.Tensor, n: int) -> torch.Tensor:
    """The number of entries up to the end of each chunk, from those up to the end of each tile."""
    last = ends[-1:] if ends.numel() % (CHUNK // TILE) else ends[:0]
    return torch.cat([ends[CHUNK // TILE - 1 :: CHUNK // TILE], last])


def write(state: Any, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """See `bagua_kernels.launchers.select.Collected.write`."""
    x, threshold = state
    with on_device(x):
        kernel("write", x.dtype)[(starts.numel(),)](
            bits(x), starts, offsets, values, x.numel(), threshold, SPAN=CHUNK, BLOCK=TILE, num_warps=WARPS, **EXACT
        )


def place(
    ends: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    add: bool = False,
) -> None:
    """See `bagua_kernels.launchers.select.place`; or adds to what is there, in float32."""
    with on_device(out):
        kernel("place")[(ends.numel(),)](
            ends, offsets, values, out, flags, offsets.numel(), out.numel(),
            ADD=add, SPAN=CHUNK, BLOCK=ENTRIES, num_warps=WARPS, **EXACT,
        )  # fmt: skip


# See `bagua_kernels.launchers.select.place_sum`.
place_sum = functools.partial(place_in_turn, place)


def permute(positions: torch.Tensor, keys: torch.Tensor, n: int, bits: int) -> None:
    """See `bagua_kernels.launchers.select.permuted`."""
    with on_device(positions):
        kernel("permute")[(triton.cdiv(positions.numel(), ENTRIES),)](
            positions, keys, positions.numel(), n, bits, N_ROUNDS=ROUNDS, BLOCK=ENTRIES, num_warps=WARPS, **EXACT
        )
