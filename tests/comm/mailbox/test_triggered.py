"""The triggered average under random schedules: conservation, order, equal bits, no torn reads, an end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.mailbox import triggered
from bagua_kernels.comm.mailbox.groups import Shuffled, Whole
from bagua_kernels.comm.mailbox.triggered import Execution, TriggeredAverage, neighbours
from tests.comm.backends.sockets.common import leaving_nothing
from tests.comm.mailbox import triggered_runs
from tests.comm.mailbox.common import over_sockets, schedules
from tests.comm.mailbox.triggered_runs import Case, check, rank, scheduled
from tests.grids import grid


@schedules(1000)
def test_random_schedules(seeds: range) -> None:
    for seed in seeds:
        case = Case.draw(seed)
        check(case, scheduled(case)[1])


@pytest.mark.slow
def test_five_thousand_versions() -> None:
    case = Case(1, 3, Shuffled(3, 2), 10, "group", [5000] * 3, [1.0, 1.0, 1.5], {}, 0.3)
    check(case, scheduled(case)[1])


def test_a_rank_that_sleeps_delays_nobody_before_it_is_needed() -> None:
    """While one rank sleeps through five versions, the others execute them."""
    case = Case(3, 4, Shuffled(4, 2), 10, "group", [9] * 4, [1.0] * 4, {(2, 3): 5.5}, 0.0)
    schedule, results = scheduled(case)
    check(case, results)
    stale = [line.staleness for line in results[2].executions]
    assert max(stale) >= 4
    assert all(line.fresh for line in results[2].executions if line.staleness == 0)
    # Nine steps and one sleep: nobody waited for the sleeper besides.
    assert schedule.now() < 9 * 1.1 + 5.5


class FreshAtTheEnd(TriggeredAverage):
    """Decides at the end whether this rank's model has been replaced."""

    def _contribute(self, version: int, members: tuple[int, ...]) -> Execution:
        receive, model = self._model.receive, self._model

        def altered(execution: Execution, read: Sequence[torch.Tensor], mean: Sequence[torch.Tensor]) -> None:
            receive(replace(execution, fresh=execution.fresh or model.version == version), read, mean)  # type: ignore[attr-defined]

        try:
            model.receive = altered  # type: ignore[method-assign]
            return super()._contribute(version, members)
        finally:
            model.receive = receive  # type: ignore[method-assign]


def test_it_matters_when_freshness_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an exchange a rank may have arrived whose last step the mean lacks."""
    monkeypatch.setattr(triggered_runs, "TriggeredAverage", FreshAtTheEnd)
    lost = 0
    for seed in range(40):
        case = Case.draw(seed)
        try:
            check(case, scheduled(case)[1])
        except AssertionError as error:
            lost += "not conserved" in str(error)
        if lost:
            break
    assert lost


def by_xor(members: Sequence[int], rank: int, version: int) -> list[int]:
    """The tree of the paper, which is complete for powers of two only."""
    root, own = version % len(members), members.index(rank)
    place = own ^ root
    found = [place ^ (1 << place.bit_length() - 1)] if place else []
    found += [place | 1 << bit for bit in range(len(members).bit_length()) if place < 1 << bit]
    return [members[each ^ root] for each in found if each ^ root < len(members)]


def told(count: int, version: int, tree: Any, first: int = 0) -> list[int]:
    """Who is told, with repetitions, if each rank passes on once what it hears first."""
    members, found = [10 * place for place in range(count)], []
    following = [(10 * first, -1)]
    while following:
        rank, sender = following.pop()
        peers = [peer for peer in tree(members, rank, version) if peer != sender]
        found += peers
        following += [(peer, rank) for peer in peers]
    return sorted(found)


@grid(cover=1, count=[1, 2, 3, 4, 5, 6, 7, 8, 12, 31])
def test_all_members_are_told_once(count: int) -> None:
    """Whoever begins."""
    for version in range(count):
        for first in range(count):
            assert told(count, version, neighbours, first) == [10 * place for place in range(count) if place != first]


def test_trees_by_xor_leave_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(8, 3, by_xor, 3) == [10 * place for place in range(8) if place != 3]
    assert told(6, 4, by_xor, 4) == [0, 10, 50]
    # Whoever is not told does not take part until its training arrives, and the others wait that long.
    case = Case(1, 6, Whole(6), None, "group", [5] * 6, [50.0, 50.0, 50.0, 50.0, 1.0, 50.0], {}, 0.0)
    schedule, results = scheduled(case)
    check(case, results)
    assert [line.fresh for line in results[4].executions] == [True] * 5
    assert schedule.now() < 5 * 55.0
    assert sum(line.fresh for line in results[2].executions) == 0
    monkeypatch.setattr(triggered, "neighbours", by_xor)
    check(case, (changed := scheduled(case))[1])
    assert sum(line.fresh for line in changed[1][2].executions) > 0


@pytest.mark.parametrize("first", [pytest.param(k, marks=pytest.mark.slow if k else ()) for k in range(0, 50, 5)])
def test_over_sockets(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time, among threads."""
    monkeypatch.setattr(triggered_runs, "open_mailbox", over_sockets)
    for seed in range(first, first + 5):
        case = Case.draw(seed)
        with leaving_nothing():
            results = run_ranks(case.size, rank, case, lambda seconds: time.sleep(seconds / 1000), lambda: None)
        check(case, results)


def test_an_error_of_the_courier_is_raised_where_it_is_waited_for() -> None:
    class Broken(triggered_runs.Model):
        def receive(self, *_: Any) -> None:
            raise ZeroDivisionError("broken")

    case = Case(1, 2, Whole(2), None, "group", [3, 3], [1.0, 1.0])
    with pytest.raises(RuntimeError, match=r"the courier of rank . ended: broken"):
        scheduled(case, Broken)


def test_arriving_twice_is_refused() -> None:
    def twice(communicator: Any) -> None:
        courier = triggered_runs.Courier(triggered_runs.open_mailbox(communicator))
        average = TriggeredAverage(courier, Whole(1), None, triggered_runs.Model(courier, 0))
        average.arrive(3)
        with pytest.raises(ValueError, match="expected a version above 3"):
            average.arrive(3)
        courier.end()

    run_ranks(1, twice)
    with pytest.raises(ValueError, match="expected period to be at least 1"):
        run_ranks(
            1, lambda c: TriggeredAverage(triggered_runs.Courier(triggered_runs.open_mailbox(c)), Whole(1), 0, None)
        )  # type: ignore[arg-type]
