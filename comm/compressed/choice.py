"""Which all-reduce suits a codec, and from which size on it pays."""

from __future__ import annotations

import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.all_reduce import CompressedAllReduce
from bagua_kernels.comm.compressed.contract import AllReduce, check_configuration
from bagua_kernels.comm.compressed.linear import LinearAllReduce
from bagua_kernels.comm.compressed.sparse import SparseAllReduce
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.compression import Codec
from bagua_kernels.compression.sparse.codec import SparseCodec

_SMALLEST = 1 << 12
_FAR = 1 << 18  # compared with the smallest, bytes show and not only latency
_REPEATS = 5
_FEW_REPEATS = 3  # beyond the budget

_measured: weakref.WeakKeyDictionary[Communicator, dict[object, int]] = weakref.WeakKeyDictionary()


def all_reduce_for(
    codec: Codec,
    communicator: Communicator,
    n: int,
    exact: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    worker_residual: bool = False,
    owner_residual: bool = False,
    pieces: int | None = None,
    plain_below: int = 0,
    own: Sequence[slice] | None = None,
) -> AllReduce:
    """Makes the all-reduce that suits a codec.

    Linear codecs get `LinearAllReduce`, other sparsifiers `SparseAllReduce`, all others `CompressedAllReduce`.

    Args:
        codec: how vectors are encoded; equal on all ranks.
        communicator: the ranks that take part.
        n: elements of the vector.
        exact: elements of the exact part.
        dtype: of both, float32, float16 or bfloat16.
        worker_residual: True if each rank keeps what its payloads lack.
        owner_residual: True if what the encoding of the mean loses is kept too. Only `CompressedAllReduce` encodes means.
        pieces: number of pieces that are pipelined; by default as suits.
        plain_below: number of elements below which vectors are sent plainly; see `measure_plain_below`.
        own: where tensors lie in the vector, as for `CompressedAllReduce`; only its codecs have blocks to fill up.

    Raises:
        TypeError, ValueError: as the class chosen.
    """
    check_configuration(codec, dtype)
    make: Callable[..., AllReduce] = partial(CompressedAllReduce, owner_residual=owner_residual, own=own)
    if codec.linear or isinstance(codec, SparseCodec):
        make = LinearAllReduce if codec.linear else SparseAllReduce
    options = {"worker_residual": worker_residual, "pieces": pieces, "plain_below": plain_below}
    return make(codec, communicator, n, exact, dtype, **options)


def measure_plain_below(
    codec: Codec,
    communicator: Communicator,
    *,
    dtype: torch.dtype = torch.float32,
    worker_residual: bool = False,
    owner_residual: bool = False,
    budget_s: float = 1.0,
    largest: int = 1 << 24,
) -> int:
    """Finds the number of elements below which a vector is averaged faster without compression; collective, and blocks.

    1. Both all-reduces run once, so that kernels are compiled and connections open.
    2. At 2**12, 2**13, … elements both are timed, five times in turns, each from a barrier on. What counts is the median, of
       the slowest rank.
    3. That ends once compression has won at two sizes running, at `largest`, or before a size that would exceed the budget.
    4. If there is no result before 2**18 elements, both are timed three times at that size, with any budget. On a slow
       link one short vector uses up the budget, and its time does not depend on bytes.
    5. The cost per further element with and without compression, from the first to the last size, then gives the size
       where the lines cross: maybe beyond all sizes that were tried.

    The result is kept: asked again with the same communicator and arguments, nothing is measured.

    Args:
        codec: how vectors would be encoded; equal on all ranks.
        communicator: the ranks that take part.
        dtype: of the vectors.
        worker_residual: as for `all_reduce_for`.
        owner_residual: as for `all_reduce_for`.
        budget_s: seconds that the measurement may take, about, beside steps 1 and 4.
        largest: number of elements that is tried at most; bounds the memory, too.

    Returns:
        The smallest size at which compression is faster, the same on all ranks. `sys.maxsize` if it never is, so that
        nothing is compressed. 0 with one rank.

    Raises:
        TypeError, ValueError: as `all_reduce_for`.
        CommunicationError: a rank was lost or did not take part in time.
    """
    check_configuration(codec, dtype)
    if communicator.size == 1:
        return 0
    key = (codec, dtype, worker_residual, owner_residual, budget_s, largest)
    known = _measured.setdefault(communicator, {})
    if key in known:
        return known[key]
    kept = {"worker_residual": worker_residual, "owner_residual": owner_residual}
    make: Callable[..., AllReduce] = partial(all_reduce_for, codec, communicator, dtype=dtype, **kept)  # type: ignore[arg-type]
    _times(make, communicator, _SMALLEST, dtype, repeats=1)
    begin = time.perf_counter()
    points: list[_Point] = []

    def measure(n: int, repeats: int) -> float:
        """Adds a point, and returns the seconds since the beginning and twice those of this point: up to the next one's end."""
        before = time.perf_counter()
        plain, compressed = _times(make, communicator, n, dtype, repeats=repeats)
        now = time.perf_counter()
        # Decisions are made on numbers that all ranks share, so that they all make the same.
        shared = torch.tensor([plain, compressed, now - begin, now - before], dtype=torch.float64)
        # waits: a measurement at start.
        shared = shared.to(communicator.device)
        communicator.all_reduce(shared, ReduceOp.MAX).wait()
        # waits: a measurement at start.
        plain, compressed, elapsed, last = shared.tolist()
        points.append(_Point(n, plain, compressed))
        return float(elapsed + 2 * last)

    n = min(_SMALLEST, largest)
    due = measure(n, _REPEATS)
    while not _decided(points) and 2 * n <= largest and due <= budget_s:
        n *= 2
        due = measure(n, _REPEATS)
    far = min(_FAR, largest)
    if not _decided(points) and n < far:
        measure(far, _FEW_REPEATS)
    known[key] = _won_from(points)
    return known[key]


class _Point(NamedTuple):
    """What was measured, of the slowest rank."""

    n: int
    plain: float
    compressed: float

    @property
    def won(self) -> bool:
        """True if compression did."""
        return self.compressed <= self.plain


def _decided(points: Sequence[_Point]) -> bool:
    """True if compression has won at two sizes running."""
    return len(points) > 1 and points[-1].won and points[-2].won


def _won_from(points: Sequence[_Point]) -> int:
    """The size from which on compression wins, `sys.maxsize` if it seems never to; points are in ascending order."""
    lost = [i for i, point in enumerate(points) if not point.won]
    if not lost:
        return points[0].n
    first, last = points[0], points[-1]
    if last.won:
        before, after = points[lost[-1]], points[lost[-1] + 1]
        if after.n <= 2 * before.n:
            return after.n
        first, last = before, after  # the lines cross between the two
    if first.n == last.n:
        return sys.maxsize
    gain = ((last.plain - first.plain) - (last.compressed - first.compressed)) / (last.n - first.n)
    # The crossing of two all but parallel lines may be beyond every size.
    return min(sys.maxsize, math.ceil(last.n + (last.compressed - last.plain) / gain)) if gain > 0 else sys.maxsize


def _times(
    make: Callable[..., AllReduce], communicator: Communicator, n: int, dtype: torch.dtype, *, repeats: int
) -> tuple[float, float]:
    """Median seconds of the plain and of the compressed all-reduce of `n` elements, on this rank."""
    # Sparsifiers take longer on some vectors than on others; these are random, and not yet averaged.
    # A generator of their own leaves the caller's random numbers as they were.
    generator = torch.Generator(communicator.device).manual_seed(communicator.rank)
    source = torch.randn(n, dtype=torch.float32, device=communicator.device, generator=generator).to(dtype)
    x = torch.empty_like(source)
    both = make(n, plain_below=sys.maxsize), make(n, plain_below=0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for all_reduce, taken in zip(both, seconds, strict=True):
            x.copy_(source)
            communicator.barrier().wait()
            _synchronize(x.device)
            begin = time.perf_counter()
            all_reduce(x, seed=repeat)
            _synchronize(x.device)
            taken.append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
