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
from bagua_kernels.comm.backends.sockets import costs as predicted
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.costs import Line
from bagua_kernels.comm.backends.sockets.tuning import EVER, WAYS, Cost, Limits, Tuning
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Work

_SIZES = tuple(1 << shift for shift in (12, 16, 18, 20, 22, 24, 26))  # bytes
_GROWTH = 4  # from one of these to the next, about
_AT_LEAST = 4 << 20  # bytes: where these were measured, what was best at the last size is used beyond it
_ROUNDS, _FEWEST = 7, 4
# Training sends a bucket now and then. Right after another call, our thread and its code are warm, and a way appears
# faster than it is. Therefore there is a pause, unless links are so long that delays matter more than processors.
_PAUSE, _LONG, _IN_A_ROW = 2e-3, 2e-3, 2  # seconds, seconds, calls
_HOPELESS = 2.0  # a way this much slower than the best of a size is not tried on the next
_FUTILE = 6.0  # nor is one on a size for which it is expected to be this much slower than the best
_VISIBLE = 0.3  # of a time, which bytes have to take for it to show their rate
_STRIPES = 0.05  # of the budget, for the number of sockets
_GAIN = 1.03  # a second socket has to bring this much, for it costs memory and a fair share of others' traffic
_SHARES = {"all_reduce": 0.5, "reduce_scatter": 0.15, "all_gather": 0.15, "all_to_all": 0.1, "broadcast": 0.1}
_WASTEFUL = ("exchange", "doubling", "star", "tree")  # send more than they must: never beyond what was measured
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
    4. Sizes grow until the next one is expected not to fit into the budget, and measuring stops when it is used up. Beyond
       4 MB, what was best at the last size is used; below, what costs least on a line of the measured rate and delay.
    5. At the last size, more than one socket between two ranks is tried, if the communicator has them.

    Args:
        communicator: by default that of all ranks. A rank to which `split` gave None does not call this.
        budget: seconds to spend.
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
    before = communicator.tuning
    tuning = replace(before, stripes=1, measured={})
    clock, delay, ranks = _Clock(communicator, before, budget), communicator.delay, communicator.size
    line = replace(Line.measured(delay), delay=delay)
    clock.barrier = _barrier_time(communicator)
    measured: dict[str, list[tuple[int, dict[str, Cost]]]] = {}
    for operation, share in _SHARES.items():
        still = sum(part for name, part in _SHARES.items() if name not in measured)
        left = clock.left() * share / (still + _STRIPES)
        if progress:
            print(f"tune: measuring {operation}, for about {left:.1f} s", file=sys.stderr, flush=True)
        rows = _sizes(clock, operation, WAYS[operation], left, line)
        measured[operation] = rows
        line = replace(line, rate=_rate(operation, ranks, rows, line))
        # What was too large to be measured takes the way that the measured line suggests.
        beyond = predicted.table(operation, ranks, line) if not rows or rows[-1][0] < _AT_LEAST else None
        easy = _EASE.get(operation, ("", 1.0))
        chosen: dict[str, Any] = {
            operation: borders(rows, *easy, processor=_PROCESSOR.get(operation, 0.0), beyond=beyond)
        }
        tuning = replace(tuning, **chosen)
    tuning = replace(tuning, barrier=predicted.fitted(ranks, line).barrier)
    rows = measured["all_reduce"]
    largest = rows[-1][0] if rows else 0
    counts = [count for count in (1, 2, 4, 8) if count <= communicator.stripes]
    if len(counts) > 1 and largest >= 2 * tuning.split and tuning.way("all_reduce", largest) != "base":
        calls = {
            f"{count}": _call(communicator, "all_reduce", largest, replace(tuning, stripes=count)) for count in counts
        }
        turn = len(counts) * (min(cost.seconds for cost in rows[-1][1].values()) + clock.barrier + _PAUSE)
        left = clock.left()
        rounds = min(_ROUNDS, int(left / turn) - 1)
        if rounds >= 1:
            found = _race(communicator, calls, rounds, over=partial(clock.over, left))
            best = min(found, key=lambda name: found[name].seconds)
            measured["stripes"] = [(largest, found)]
            tuning = replace(tuning, stripes=int(best) if found["1"].seconds > _GAIN * found[best].seconds else 1)
    return replace(tuning, measured=measured)


class _Clock:
    """The time of the slowest rank, on which all ranks agree.

    Args:
        communicator: that is measured.
        table: for the messages of the clock.
        budget: seconds from now on.

    Attributes:
        barrier: seconds of a barrier.
    """

    def __init__(self, communicator: StripedCommunicator, table: Tuning, budget: float) -> None:
        self.communicator = communicator
        self.barrier = 0.0
        self._table = table
        self._budget = budget
        self._started = time.perf_counter()

    def left(self) -> float:
        """Returns the seconds that are left of the budget; collective."""
        self.communicator.retune(self._table)
        return self._budget - float(max(self.communicator.all_gather_object(time.perf_counter() - self._started)))

    def over(self, before: float, share: float | None = None) -> bool:
        """Returns True if a share of the budget is used up, of which `before` was left when it began; collective."""
        return before - self.left() >= (before if share is None else share)


def _rate(operation: str, ranks: int, rows: Sequence[tuple[int, Mapping[str, Cost]]], line: Line) -> float:
    """Returns the bytes per second of a line on which the largest size took as long as it was measured to take."""
    rates = []
    for nbytes, found in rows[-1:]:
        for way, cost in found.items():
            if way != "base":
                sent = predicted.bytes_sent(operation, way, ranks, nbytes)
                spent = cost.seconds - predicted.delays(operation, way, ranks) * line.delay
                # Where delays take most of the time, no more is known than that bytes take little of it.
                least = _VISIBLE * cost.seconds
                rates.append(sent / spent if spent > least else max(line.rate, sent / least))
    return max(rates, default=line.rate)


def _sizes(
    clock: _Clock, operation: str, ways: Sequence[str], budget: float, line: Line
) -> list[tuple[int, dict[str, Cost]]]:
    """Returns, for each size that fits into the budget, the costs of the ways that are still in the race.

    A size begins only if it is expected to end in time: at first by the model of `costs`, then by the size before.
    """
    communicator, rows, begun = clock.communicator, list[tuple[int, dict[str, Cost]]](), clock.left()
    long, left, before, ranks = clock.barrier > _LONG, list(ways), dict[str, float](), communicator.size
    most = _FEWEST if long else _ROUNDS  # where delays decide, times are much the same
    for nbytes in _SIZES:
        expected = {way: before.get(way) or _expected(operation, way, ranks, nbytes, line) for way in left}
        least = min(expected.values())
        tried = [way for way in left if expected[way] <= _FUTILE * least]
        # After a barrier ranks start up to a one-way delay apart; in a row, that counts once.
        row = _IN_A_ROW if long and operation != "broadcast" and nbytes < _AT_LEAST else 1
        turn = sum(row * expected[way] + clock.barrier + _PAUSE for way in tried)
        spare = budget - (begun - clock.left())
        if spare < 2 * turn:
            break
        # Half of what is left at most, so that larger sizes have their turn.
        rounds = max(1, min(most, int(spare / 2 / turn) - 1))
        calls = {
            way: _call(communicator, operation, nbytes, replace(communicator.tuning, **{operation: ((EVER, way),)}))  # type: ignore[arg-type]
            for way in tried
        }
        found = _race(communicator, calls, rounds, row, partial(clock.over, begun, budget))
        if not found:
            break
        rows.append((nbytes, found))
        times = {way: cost.seconds for way, cost in found.items()}
        best = min(times.values())
        # Gloo is measured wherever it is not futile, because no chosen way may be slower, and small sizes do not predict
        # large ones.
        left = [
            way
            for way in left
            if way == "base"
            or way not in times
            or times[way] < _HOPELESS * best
            or (nbytes < _AT_LEAST and way not in _WASTEFUL)
        ]
        # From here on by what was measured: as much longer as the model has it, for a line of the rate that was seen.
        line = replace(line, rate=_rate(operation, ranks, rows, line))
        for way, seconds in times.items():
            here, there = (_expected(operation, way, ranks, n, line) for n in (nbytes, _GROWTH * nbytes))
            before[way] = seconds * min(_GROWTH, there / here)
    return rows


def _expected(operation: str, way: str, ranks: int, nbytes: int, line: Line) -> float:
    """Returns the seconds of a call that has not been measured."""
    if way != "base":
        return predicted.seconds(operation, way, ranks, nbytes, line)
    # Gloo's ring waits for four delays a rank, and its reduce-scatter is an all-reduce. The rest is a guess, rather too high:
    # Gloo is worth a measurement where bytes matter more than delays.
    waits = (4 if operation in ("all_reduce", "reduce_scatter") else 2) * (ranks - 1)
    ways = [each for each in WAYS[operation] if each != "base"]
    return max(waits * line.delay, min(predicted.seconds(operation, each, ranks, nbytes, line) for each in ways))


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
    communicator: Communicator,
    calls: dict[str, Callable[[], None]],
    rounds: int,
    row: int = 1,
    over: Callable[[], bool] | None = None,
) -> dict[str, Cost]:
    """Lets the calls take turns; returns what each costs, nothing if not even one round ended in time.

    Seconds are the median over rounds of the slowest rank's, for all wait for it. Processor time is that of all threads
    of a process.

    Args:
        communicator: whose ranks make the calls.
        calls: by name.
        rounds: that count, after a first one that does not.
        row: calls in a row.
        over: asked after each round but the last, on all ranks; returns True on all if the time is over.
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
        if number < rounds and over is not None and over():
            break
    if not all(taken.values()):
        return {}
    everyone = communicator.all_gather_object(taken)
    return {
        name: Cost(
            statistics.median(max(cost.seconds for cost in costs) for costs in zip(*ranks, strict=True)),
            statistics.fmean(statistics.median(cost.processor for cost in costs) for costs in ranks),
        )
        for name, ranks in ((name, [one[name] for one in everyone]) for name in calls)
    }


def borders(
    rows: Sequence[tuple[int, Mapping[str, Cost]]],
    favoured: str = "",
    favour: float = 1.0,
    processor: float = 0.0,
    beyond: Limits | None = None,
) -> Limits:
    """Turns costs by size into sizes up to which each way is the best.

    Args:
        rows: (bytes, {way: cost}), ascending.
        favoured: a way that is taken where it is not slower than the base and not much slower than the fastest.
        favour: how many times as long as the fastest it may take.
        processor: what a second of processor time counts, among ways that are not much slower than the fastest.
        beyond: the ways for sizes above the last one; by default the best one of those that send no more than they must.
    """
    if not rows:
        return beyond or ()

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
    if beyond is not None:
        limits = [(limit, way) for limit, way in beyond if limit > 2 * nbytes]
        return (*choice, *([] if limits[0][1] == chosen[-1][1] else [(2.0 * nbytes, chosen[-1][1])]), *limits)
    lasting = best({way: cost for way, cost in costs.items() if way not in _WASTEFUL})
    if lasting != chosen[-1][1]:
        choice.append((float(nbytes), chosen[-1][1]))
    return (*choice, (EVER, lasting))
