"""Which all-reduce suits a codec, and from which size on it pays."""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.all_reduce import CompressedAllReduce
from bagua_kernels.comm.compressed.contract import AllReduce
from bagua_kernels.comm.compressed.linear import LinearAllReduce
from bagua_kernels.comm.compressed.sparse import SparseAllReduce
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.compression import Codec
from bagua_kernels.compression.sparse import SparseCodec

_SMALLEST = 1 << 12
_REPEATS = 5

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
) -> AllReduce:
    """Makes the all-reduce that suits a codec.

    Linear codecs get `LinearAllReduce`, other sparsifiers `SparseAllReduce`, all others `CompressedAllReduce`.

    Args:
        codec: how vectors are encoded; equal on all ranks.
        communicator: the ranks that take part.
        n: elements of the vector.
        exact: elements of the exact part.
        dtype: of both, float32, float16 or bfloat16.
        worker_residual: whether each rank keeps what its payloads lack.
        owner_residual: whether what the encoding of the mean loses is kept too. Only `CompressedAllReduce` encodes means.
        pieces: number of pieces that are pipelined; by default as suits.
        plain_below: number of elements below which vectors are sent plainly; see `measure_plain_below`.

    Raises:
        TypeError, ValueError: as the class chosen.
    """
    if codec.linear or isinstance(codec, SparseCodec):
        one_pass = LinearAllReduce if codec.linear else SparseAllReduce
        return one_pass(
            codec,
            communicator,
            n,
            exact,
            dtype,
            worker_residual=worker_residual,
            pieces=pieces,
            plain_below=plain_below,
        )
    return CompressedAllReduce(
        codec,
        communicator,
        n,
        exact,
        dtype,
        worker_residual=worker_residual,
        owner_residual=owner_residual,
        pieces=pieces,
        plain_below=plain_below,
    )


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

    The result is kept: asked again with the same communicator and arguments, nothing is measured.

    Args:
        codec: how vectors would be encoded; equal on all ranks.
        communicator: the ranks that take part.
        dtype: of the vectors.
        worker_residual: as for `all_reduce_for`.
        owner_residual: as for `all_reduce_for`.
        budget_s: seconds that the measurement may take, about, beside step 1.
        largest: number of elements that is tried at most; bounds the memory, too.

    Returns:
        The size from which on compression has always won, the same on all ranks; `sys.maxsize` if it lost at the last size
        tried, so that everything is sent plainly; 0 with one rank.
    """
    if communicator.size == 1:
        return 0
    key = (codec, dtype, worker_residual, owner_residual, budget_s, largest)
    known = _measured.setdefault(communicator, {})
    if key in known:
        return known[key]

    def make(n: int, plain_below: int) -> AllReduce:
        return all_reduce_for(
            codec,
            communicator,
            n,
            dtype=dtype,
            worker_residual=worker_residual,
            owner_residual=owner_residual,
            plain_below=plain_below,
        )

    _times(make, communicator, _SMALLEST, dtype, repeats=1)
    begin = time.perf_counter()
    n, won_from, wins = min(_SMALLEST, largest), sys.maxsize, 0
    while wins < 2:
        before = time.perf_counter()
        plain, compressed = _times(make, communicator, n, dtype, repeats=_REPEATS)
        now = time.perf_counter()
        # The decision is made on numbers that all ranks share, so that they all make the same.
        shared = torch.tensor([plain, compressed, now - begin, now - before], dtype=torch.float64)
        shared = shared.to(communicator.device)
        communicator.all_reduce(shared, ReduceOp.MAX).wait()
        plain, compressed, elapsed, last = shared.tolist()
        won = compressed <= plain
        wins = wins + 1 if won else 0
        won_from = (min(won_from, n)) if won else sys.maxsize
        if 2 * n > largest or elapsed + 2 * last > budget_s:
            break
        n *= 2
    known[key] = won_from
    return won_from


def _times(
    make: Callable[[int, int], AllReduce], communicator: Communicator, n: int, dtype: torch.dtype, *, repeats: int
) -> tuple[float, float]:
    """Median seconds of the plain and of the compressed all-reduce of `n` elements, on this rank."""
    # Sparsifiers take longer on some vectors than on others; these are random, and not yet averaged.
    source = torch.randn(n, device=communicator.device).to(dtype)
    x = torch.empty_like(source)
    both = make(n, sys.maxsize), make(n, 0)
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
