"""Measures which way of carrying out a collective is the best for which size on the links at hand."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import EVER, WAYS, Cost, Limits, Tuning
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Work

_SIZES = tuple(1 << shift for shift in (12, 16, 18, 20, 22, 24, 26))  # bytes
_GROWTH = 4  # from one of these to the next, about
_AT_LEAST = 4 << 20  # bytes up to which is measured whatever it takes: beyond, what was best there is used
_ROUNDS, _FEWEST = 7, 4
# Training sends a bucket now and then. Right after another call, our thread and its code are warm, and a way appears
# faster than it is. Therefore there is a pause, unless links are so long that delays matter more than processors.
_PAUSE, _LONG, _IN_A_ROW = 2e-3, 2e-3, 2  # seconds, seconds, calls
_HOPELESS = 2.0  # a way this much slower than the best of a size is not tried on the next
_GAIN = 1.03  # a second socket has to bring this much, for it costs memory and a fair share of others' traffic
_SHARES = {"all_reduce": 0.5, "reduce_scatter": 0.15, "all_gather": 0.15, "all_to_all": 0.1, "broadcast": 0.1}
_WASTEFUL = ("exchange", "doubling", "star")  # send more than they must: never beyond what was measured
_WORLD: Any = object()  # None will not do: `split` returns it to ranks that are no members
# What a second of processor time counts beside a second until all is through: where the network is what training waits for,
# the latter is lost, else the former. A judgement: with 2, what is taken is also the faster one beside training on four ranks
# with a core for two. Whatever it saves, a way that is much slower than the fastest is not taken. The other operations overlap
# better by sockets of their own.
_PROCESSOR, _SLOWER = {"all_reduce": 2.0, "broadcast": 2.0}, 1.25
# Overlaps with what else is under way, which is worth losing so much alone: to the best, and to the base.
_EASE, _EASE_BASE = {"all_gather": ("direct", 1.12)}, 1.03


def tune(
    communicator: Communicator | None = _WORLD, *, budget: float = 8.0, apply: bool = True, progress: bool = True
) -> Tuning:
    """Measures every way of each collective at growing sizes, and follows the best from now on; collective.

    1. For each size, the ways take turns, after a pause, or a few times in a row for small messages on long links. A way's
       time is the median over rounds of the slowest rank's time. Its processor time is the mean over ranks of their
       medians. All ranks learn all times, so that all decide alike.
    2. The best way is the fastest one. For all-reduce and broadcast, the ways that take at most 1.25 times as long as the
       fastest are compared. The best one then has the least sum of seconds and twice the processor seconds.
    3. Between two sizes whose best ways differ, the border is their geometric mean.
    4. Sizes grow to 4 MB at least, then until the budget is used up; what was best at the last one is used beyond.
    5. At the last size, more than one socket between two ranks is tried, if the communicator has them.

    Args:
        communicator: by default that of all ranks. A rank to which `split` gave None does not call this.
        budget: seconds to spend, about; a slow network takes more.
        apply: True if `communicator` follows the result.
        progress: True if rank 0 writes what is being measured to the standard error.

    Returns:
        The table, with what was measured; the same on all ranks.

    Raises:
        ValueError: if the communicator is None or has nothing to choose from.
    """
    if communicator is _WORLD:
        communicator = rendezvous.world()
    if communicator is None:
        raise ValueError("tune expects a communicator, got None, which split returns to a rank that is no member")
    if not isinstance(communicator, StripedCommunicator):
        raise ValueError(
            f"tune expects a StripedCommunicator, got {type(communicator).__name__}, which has one way of doing things"
        )
    if communicator.size == 1:
        return communicator.tuning
    before = communicator.tuning
    try:
        tuning = _measure(communicator, budget, progress and communicator.rank == 0)
    finally:
        communicator.retune(before)
    if apply:
        communicator.retune(tuning)
    return tuning


def _measure(communicator: StripedCommunicator, budget: float, progress: bool = False) -> Tuning:
    tuning = replace(communicator.tuning, stripes=1, measured={})
    long = _barrier_time(communicator) > _LONG
    measured: dict[str, list[tuple[int, dict[str, Cost]]]] = {}
    for operation, share in _SHARES.items():
        if progress:
            print(f"tune: measuring {operation}, for about {budget * share:.1f} s", file=sys.stderr, flush=True)
        rows = _sizes(communicator, operation, WAYS[operation], budget * share, long)
        measured[operation] = rows
        chosen: dict[str, Any] = {
            operation: borders(rows, *_EASE.get(operation, ("", 1.0)), processor=_PROCESSOR.get(operation, 0.0))
        }
        tuning = replace(tuning, **chosen)
    largest = measured["all_reduce"][-1][0]
    counts = [count for count in (1, 2, 4, 8) if count <= communicator.stripes]
    if len(counts) > 1 and largest >= 2 * tuning.split and tuning.way("all_reduce", largest) != "base":
        calls = {
            f"{count}": _call(communicator, "all_reduce", largest, replace(tuning, stripes=count)) for count in counts
        }
        costs = _race(communicator, calls, _ROUNDS)
        best = min(costs, key=lambda name: costs[name].seconds)
        measured["stripes"] = [(largest, costs)]
        tuning = replace(tuning, stripes=int(best) if costs["1"].seconds > _GAIN * costs[best].seconds else 1)
    return replace(tuning, measured=measured)


def _sizes(
    communicator: StripedCommunicator, operation: str, ways: Sequence[str], budget: float, long: bool
) -> list[tuple[int, dict[str, Cost]]]:
    """Returns, for each size that fits into the budget, the costs of the ways that are still in the race."""
    rows: list[tuple[int, dict[str, Cost]]] = []
    started, left = time.perf_counter(), list(ways)
    rounds = _FEWEST if long else _ROUNDS  # where delays decide, times are much the same
    for nbytes in _SIZES:
        calls = {
            way: _call(communicator, operation, nbytes, replace(communicator.tuning, **{operation: ((EVER, way),)}))  # type: ignore[arg-type]
            for way in left
        }
        # After a barrier ranks start up to a one-way delay apart; in a row, that counts once.
        row = _IN_A_ROW if long and operation != "broadcast" and nbytes < _AT_LEAST else 1
        costs = _race(communicator, calls, rounds, row)
        rows.append((nbytes, costs))
        times = {way: cost.seconds for way, cost in costs.items()}
        best = min(times.values())
        # Gloo is always measured, because no chosen way may be slower, and small sizes do not predict large ones.
        left = [
            way
            for way in left
            if way == "base" or times[way] < _HOPELESS * best or (nbytes < _AT_LEAST and way not in _WASTEFUL)
        ]
        spent = communicator.all_gather_object(time.perf_counter() - started)
        turn = sum(times[way] for way in left) * _GROWTH * row
        rounds = int(min(rounds, max(_FEWEST, (budget - max(spent)) / turn - 1)))
        if nbytes >= _AT_LEAST and max(spent) + turn * (rounds + 1) > budget:
            break
    return rows


def _call(communicator: StripedCommunicator, operation: str, nbytes: int, tuning: Tuning) -> Callable[[], None]:
    n, size = max(1, nbytes // 4), communicator.size
    few = torch.zeros(n, dtype=torch.float32)
    many = few if operation in ("all_reduce", "broadcast") else torch.zeros(n * size, dtype=torch.float32)
    other = torch.zeros(n * size, dtype=torch.float32) if operation == "all_to_all" else few

    start: Callable[[], Work] = {
        "all_reduce": partial(communicator.all_reduce, few, ReduceOp.SUM),
        "reduce_scatter": partial(communicator.reduce_scatter, few, many, ReduceOp.SUM),
        "all_gather": partial(communicator.all_gather, many, few),
        "all_to_all": partial(communicator.all_to_all, other, many),
        "broadcast": partial(communicator.broadcast, few, 0),
    }[operation]

    def call() -> None:
        communicator.retune(tuning)
        start().wait()

    return call


def _barrier_time(communicator: Communicator) -> float:
    """Returns the median seconds of a barrier, on the slowest rank."""
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        communicator.barrier().wait()
        taken.append(time.perf_counter() - started)
    return float(max(communicator.all_gather_object(statistics.median(taken))))


def _race(
    communicator: Communicator, calls: dict[str, Callable[[], None]], rounds: int, row: int = 1
) -> dict[str, Cost]:
    """Lets the calls take turns; returns what each costs.

    Seconds are the median over rounds of the slowest rank's, for all wait for it. Processor time is that of all threads
    of a process.
    """
    taken: dict[str, list[Cost]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            communicator.barrier().wait()
            time.sleep(_PAUSE)
            started, busy = time.perf_counter(), time.process_time()
            for _ in range(row):
                call()
            cost = Cost((time.perf_counter() - started) / row, (time.process_time() - busy) / row)
            if number:  # the first round touches memory and opens congestion windows
                taken[name].append(cost)
    everyone = communicator.all_gather_object(taken)
    return {
        name: Cost(
            statistics.median(max(cost.seconds for cost in costs) for costs in zip(*ranks, strict=True)),
            statistics.fmean(statistics.median(cost.processor for cost in costs) for costs in ranks),
        )
        for name, ranks in ((name, [one[name] for one in everyone]) for name in calls)
    }


def borders(
    rows: Sequence[tuple[int, Mapping[str, Cost]]], favoured: str = "", favour: float = 1.0, processor: float = 0.0
) -> Limits:
    """Turns costs by size into sizes up to which each way is the best.

    Args:
        rows: (bytes, {way: cost}), ascending.
        favoured: a way that is taken where it is not slower than the base and not much slower than the fastest.
        favour: how many times as long as the fastest it may take.
        processor: what a second of processor time counts, among ways that are not much slower than the fastest.
    """

    def best(costs: Mapping[str, Cost]) -> str:
        least = min(cost.seconds for cost in costs.values())
        base = costs["base"].seconds if "base" in costs else math.inf
        if favoured in costs and costs[favoured].seconds <= min(favour * least, _EASE_BASE * base):
            return favoured
        ways = [way for way, cost in costs.items() if cost.seconds <= _SLOWER * least]
        return min(ways, key=lambda way: costs[way].seconds + processor * costs[way].processor)

    chosen = [(nbytes, best(costs)) for nbytes, costs in rows]
    choice = [(math.sqrt(here * there), way) for (here, way), (there, next_way) in pairwise(chosen) if way != next_way]
    nbytes, costs = rows[-1]
    lasting = best({way: cost for way, cost in costs.items() if way not in _WASTEFUL})
    if lasting != chosen[-1][1]:
        choice.append((float(nbytes), chosen[-1][1]))
    return (*choice, (EVER, lasting))
