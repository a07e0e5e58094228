"""The choice of the elements of largest magnitude: a threshold from a sample, one pass, and ties by index."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from bagua_kernels.launchers.select import Collected
from bagua_kernels.rules.random import mix
from bagua_kernels.upload import uploaded

# A sample is made of runs, so that each cache line that is fetched is used.
RUN = 32
_mixed: Callable[[Any], Any] = mix
# Vectors up to this length are their own sample; a longer one's sample has at most so many elements, or 512 / ratio.
WHOLE = 8192
LARGEST_SAMPLE = 65_536


@functools.lru_cache(maxsize=64)
def sampled_runs(n: int, size: int) -> torch.Tensor:
    """Which runs of 32 elements make a sample: one from each of equal strata, at a place that is a hash of its number."""
    runs = n // RUN
    number = np.arange(size // RUN, dtype=np.int64)
    first = number * runs // number.size
    length = (number + 1) * runs // number.size - first
    with np.errstate(over="ignore"):
        hashed = _mixed(number.astype(np.uint32)).astype(np.int64)
    return torch.from_numpy(first + hashed % length)


def sample_keys(x: torch.Tensor, residual: torch.Tensor | None, size: int) -> torch.Tensor:
    """Keys of a sample of `x`, or of the sum with `residual`, int32; the same elements on every device."""

    def taken(v: torch.Tensor) -> torch.Tensor:
        if size >= v.numel():
            return v.float()
        runs = uploaded(sampled_runs(v.numel(), size), v.device)
        return v[: v.numel() // RUN * RUN].view(-1, RUN).index_select(0, runs).view(-1).float()

    values = taken(x) if residual is None else taken(residual) + taken(x)
    return values.view(torch.int32) & 0x7FFFFFFF


def sample_size(n: int, sample: float, ratio: float) -> int:
    """The size of the sample of a vector: all of it, or a multiple of 32."""
    wanted = max(WHOLE, min(math.ceil(sample * n), max(LARGEST_SAMPLE, math.ceil(512 / ratio))))
    return n if wanted >= n else wanted // RUN * RUN


def largest(keys: torch.Tensor, k: int) -> int:
    """The k-th largest key."""
    if keys.device.type == "cpu":
        # NumPy selects with vector instructions.
        return int(np.partition(keys.numpy(), keys.numel() - k)[keys.numel() - k])
    # waits: the threshold is an argument of the next launch.
    return int(torch.topk(keys, k, sorted=False).values.min())


@dataclass(frozen=True)
class Chosen:
    """The entries that were chosen.

    Attributes:
        ends: shape (chunks,), int64: number of entries in each chunk and all before.
        count: number of entries.
        threshold: the least key among them.
    """

    ends: torch.Tensor
    count: int
    threshold: int


def choose(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    offsets: torch.Tensor,
    values: torch.Tensor,
    *,
    k: int,
    low: int,
    high: int,
    rank: Fraction,
    sample: int,
) -> Chosen:
    """Chooses about `k` elements of the largest magnitude, and writes them in the order of their index.

    A threshold is estimated from a sample, and lowered until at least `low` elements reach it. If more than `high` do, the
    exact `k` largest are taken among them, the lowest indices where magnitudes are equal. With `low` = `high` = `k` the
    result is the exact one.

    Args:
        x: shape (n,), n >= 1.
        residual: shape (n,), float32; if given, becomes `residual + x`, from which the elements are chosen.
        offsets: shape (high or more,), int16; the first `count` are written.
        values: shape (high or more,), float32; the first `count` are written.
        k: number of elements wanted.
        low: least number of elements that is accepted.
        high: greatest number of elements that is accepted.
        rank: multiple of `k` that the first threshold aims at.
        sample: size of the sample.
    """
    n = x.numel()
    keys = sample_keys(x, residual, sample)
    aim = k if sample == n else max(1, math.ceil(rank * k * sample / n))
    while True:
        threshold = largest(keys, aim) if aim <= sample else 0
        found = Collected(x, threshold, residual, expected=aim * n // sample)
        if found.count >= low:
            break
        x, residual, aim = (x, None, 2 * aim) if residual is None else (residual, None, 2 * aim)
    if found.count <= high:
        found.write(offsets, values)
        return Chosen(found.ends, found.count, threshold)
    all_offsets = torch.empty(found.count, dtype=torch.int16, device=x.device)
    all_values = torch.empty(found.count, dtype=torch.float32, device=x.device)
    found.write(all_offsets, all_values)
    keys = all_values.view(torch.int32) & 0x7FFFFFFF
    threshold = largest(keys, k)
    above, equal = keys > threshold, keys == threshold
    ties = k - above.sum()
    chosen = above | (equal & (equal.cumsum(0) <= ties))
    # waits: only if more elements reach the threshold than the payload takes.
    index = chosen.nonzero().view(-1)
    offsets[:k] = all_offsets[index]
    values[:k] = all_values[index]
    before = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    return Chosen(before[found.ends], k, threshold)
