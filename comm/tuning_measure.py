"""Measures which way of carrying out a collective is the fastest for which size on the links at hand."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.striped import StripedCommunicator
from bagua_kernels.comm.tuning import EVER, WAYS, Choice, Tuning

_SIZES = tuple(1 << shift for shift in (12, 16, 18, 20, 22, 24, 26))  # bytes
_GROWTH = 4  # from one of these to the next, about
_AT_LEAST = 4 << 20  # bytes up to which is measured whatever it takes: beyond, what was fastest there is used
_ROUNDS, _FEWEST = 7, 4
# Training sends a bucket now and then. Right after another call, our thread and its code are warm, and a way looks
# better than it is; so there is a pause, unless links are so long that delays decide and not processors.
_PAUSE, _LONG, _IN_A_ROW = 2e-3, 2e-3, 2  # seconds, seconds, calls
_HOPELESS = 2.0  # a way this much slower than the best of a size is not tried on the next
_GAIN = 1.03  # a second socket has to bring this much, for it costs memory and a fair share of others' traffic
_SHARES = {"all_reduce": 0.5, "reduce_scatter": 0.15, "all_gather": 0.15, "all_to_all": 0.1, "broadcast": 0.1}
_WASTEFUL = ("exchange", "doubling", "star")  # send more than they must: never beyond what was measured
_WORLD: Any = object()  # None will not do: `split` returns it to ranks that are no members
# How much faster than the base a way has to be to be taken. Short messages: less is not told from noise, and a thread of
# Python suffers more than Gloo from a cold start. A single all-reduce or broadcast: it gains nothing but time. The other
# operations overlap better by sockets of their own.
_SHORT, _LEAD_SHORT, _LEAD = 64 << 10, 1.25, {"all_reduce": 1.10, "broadcast": 1.10}
# Overlaps with what else is under way, which is worth losing so much alone: to the best, and to the base.
_EASE, _EASE_BASE = {"all_gather": ("direct", 1.12)}, 1.03


def tune(communicator: Communicator | None = _WORLD, *, budget: float = 8.0, apply: bool = True) -> Tuning:
    """Measures every way of each collective at growing sizes, and follows the fastest from now on; collective.

    1. For each size, every way takes turns with the others, after a pause, or small messages on long links a few times
       in a row; a way's time is the median over rounds of the slowest rank's time. All ranks learn all times, so that
       all decide alike.
    2. Between two sizes whose fastest ways differ, the border is their geometric mean.
    3. Sizes grow to 4 MB at least, then until the budget is used up; what was fastest at the last one is used beyond.
    4. At the last size, more than one socket between two ranks is tried, if the communicator has them.

    Args:
        communicator: by default that of all ranks. A rank to which `split` gave None does not call this.
        budget: seconds to spend, about; a slow network takes more.
        apply: whether `communicator` follows the result.

    Returns:
        The table, with the measured seconds in `measured`; the same on all ranks.

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
        tuning = _measure(communicator, budget)
    finally:
        communicator.retune(before)
    if apply:
        communicator.retune(tuning)
    return tuning


def _measure(communicator: StripedCommunicator, budget: float) -> Tuning:
    tuning = replace(communicator.tuning, stripes=1, measured={})
    long = _barrier_time(communicator) > _LONG
    measured: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for operation, share in _SHARES.items():
        rows = _sizes(communicator, operation, WAYS[operation], budget * share, long)
        measured[operation] = rows
        chosen: dict[str, Any] = {
            operation: borders(rows, *_EASE.get(operation, ("", 1.0)), lead=_LEAD.get(operation, 1.0))
        }
        tuning = replace(tuning, **chosen)
    largest = measured["all_reduce"][-1][0]
    counts = [count for count in (1, 2, 4, 8) if count <= communicator.stripes]
    if len(counts) > 1 and largest >= 2 * tuning.split and tuning.way("all_reduce", largest) != "base":
        calls = {
            f"{count}": _call(communicator, "all_reduce", largest, replace(tuning, stripes=count)) for count in counts
        }
        times = _race(communicator, calls, _ROUNDS)
        best = min(times, key=lambda name: times[name])
        measured["stripes"] = [(largest, times)]
        tuning = replace(tuning, stripes=int(best) if times["1"] > _GAIN * times[best] else 1)
    return replace(tuning, measured=measured)


def _sizes(
    communicator: StripedCommunicator, operation: str, ways: Sequence[str], budget: float, long: bool
) -> list[tuple[int, dict[str, float]]]:
    """Returns, for each size that fits into the budget, the seconds of the ways that are still in the race."""
    rows: list[tuple[int, dict[str, float]]] = []
    started, left = time.perf_counter(), list(ways)
    rounds = _FEWEST if long else _ROUNDS  # where delays decide, times are much the same
    for nbytes in _SIZES:
        calls = {
            way: _call(communicator, operation, nbytes, replace(communicator.tuning, **{operation: ((EVER, way),)}))  # type: ignore[arg-type]
            for way in left
        }
        # After a barrier ranks start up to a one-way delay apart; in a row, that counts once.
        row = _IN_A_ROW if long and operation != "broadcast" and nbytes < _AT_LEAST else 1
        times = _race(communicator, calls, rounds, row)
        rows.append((nbytes, times))
        best = min(times.values())
        # Gloo stays in, as what none of the others may be slower than, and small sizes say nothing about large ones.
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
    few = torch.zeros(n)
    many = few if operation in ("all_reduce", "broadcast") else torch.zeros(n * size)
    other = torch.zeros(n * size) if operation == "all_to_all" else few

    def call() -> None:
        communicator.retune(tuning)
        if operation == "all_reduce":
            communicator.all_reduce(few, ReduceOp.SUM).wait()
        elif operation == "reduce_scatter":
            communicator.reduce_scatter(few, many, ReduceOp.SUM).wait()
        elif operation == "all_gather":
            communicator.all_gather(many, few).wait()
        elif operation == "all_to_all":
            communicator.all_to_all(other, many).wait()
        else:
            communicator.broadcast(few, 0).wait()

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
) -> dict[str, float]:
    """Lets the calls take turns; returns the median over rounds of the slowest rank's seconds a call, for each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            communicator.barrier().wait()
            time.sleep(_PAUSE)
            started = time.perf_counter()
            for _ in range(row):
                call()
            if number:  # the first round touches memory and opens congestion windows
                taken[name].append((time.perf_counter() - started) / row)
    everyone = communicator.all_gather_object(taken)
    return {name: statistics.median(map(max, zip(*(one[name] for one in everyone), strict=True))) for name in calls}


def borders(
    rows: Sequence[tuple[int, dict[str, float]]], favoured: str = "", favour: float = 1.0, lead: float = 1.0
) -> Choice:
    """Turns times by size into sizes up to which each way is the fastest.

    Args:
        rows: (bytes, {way: seconds}), ascending.
        favoured: a way that is taken where it is not slower than the base and not much slower than the best.
        favour: how many times as long as the best it may take.
        lead: how many times as fast as the base a way has to be; short messages ask for 1.25 at least.
    """

    def fastest(nbytes: int, times: dict[str, float]) -> str:
        ahead = max(lead, _LEAD_SHORT) if nbytes <= _SHORT else lead
        times = {way: seconds * (1.0 if way == "base" else ahead) for way, seconds in times.items()}
        best = min(times, key=lambda way: times[way])
        if favoured in times and times[favoured] <= min(favour * times[best], _EASE_BASE * times.get("base", math.inf)):
            return favoured
        return best

    chosen = [(nbytes, fastest(nbytes, times)) for nbytes, times in rows]
    choice = [(math.sqrt(here * there), way) for (here, way), (there, next_way) in pairwise(chosen) if way != next_way]
    nbytes, times = rows[-1]
    lasting = fastest(nbytes, {way: seconds for way, seconds in times.items() if way not in _WASTEFUL})
    if lasting != chosen[-1][1]:
        choice.append((float(nbytes), chosen[-1][1]))
    return (*choice, (EVER, lasting))
