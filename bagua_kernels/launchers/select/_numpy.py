"""Selection in NumPy: keys are compared, and what they choose is copied."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numpy import array, load, meant, plain
from bagua_kernels.launchers.select import CHUNK, ROUNDS, place_in_turn
from bagua_kernels.rules.selection import feistel_left, joined, left_half, magnitude_key, right_half


@meant
def collect(x: torch.Tensor, threshold: int, residual: torch.Tensor | None, expected: int) -> tuple[torch.Tensor, Any]:
    """The number of entries of each chunk, and what `write` needs: the indices and values of the entries."""
    values = load(x)
    if residual is not None:
        values = array(residual)
        values += load(x)
    entries = np.flatnonzero(plain(magnitude_key)(values) >= threshold)
    counts = np.bincount(entries // CHUNK, minlength=-(-x.numel() // CHUNK))
    return torch.from_numpy(counts), (entries, values[entries])


def chunk_ends(ends: torch.Tensor, n: int) -> torch.Tensor:
    """The number of entries up to the end of each chunk."""
    return ends


def write(state: Any, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """See `bagua_kernels.launchers.select.Collected.write`."""
    entries, found = state
    array(offsets.view(torch.uint16))[: entries.size] = entries % CHUNK
    array(values)[: entries.size] = found


@meant
def place(
    ends: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    add: bool = False,
) -> None:
    """See `bagua_kernels.launchers.select.place`; or adds to what is there, in float32."""
    bad_ends_and_offsets, target, given = array(flags), array(out), array(values)
    stops = array(ends.view(torch.uint32)).astype(np.int64)
    for chunk, (begin, stop) in enumerate(itertools.pairwise([0, *stops])):
        entries = array(offsets.view(torch.uint16))[begin:stop].astype(np.int64)
        good = (entries > np.concatenate([[-1], entries])[:-1]) & (entries < target.size - chunk * CHUNK)
        bad_ends_and_offsets |= [begin > stop or stop > given.size, not good.all()]
        chosen = chunk * CHUNK + entries[good]
        target[chosen] = given[begin:stop][good] + (target[chosen] if add else 0)


# See `bagua_kernels.launchers.select.place_sum`.
place_sum = functools.partial(place_in_turn, place)


@meant
def permute(positions: torch.Tensor, keys: torch.Tensor, n: int, bits: int) -> None:
    """See `bagua_kernels.launchers.select.permuted`."""
    pairs = array(keys.view(torch.uint32)).reshape(ROUNDS, 2)
    index, mask = np.arange(positions.numel()), np.uint32((1 << bits) - 1)
    walking = index.copy()  # the places whose index is not below n yet
    while walking.size:
        left, right = plain(left_half)(index[walking], bits), plain(right_half)(index[walking], mask)
        for pair in pairs:
            left, right = right, plain(feistel_left)(left, right, mask, *pair)
        index[walking] = plain(joined)(left, right, bits)
        walking = walking[index[walking] >= n]
    array(positions)[:] = index
