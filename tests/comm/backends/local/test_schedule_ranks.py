"""Communicators of ranks that are threads, under a `Schedule`: the same results and errors, in many orders, at once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError, RankLostError
from tests.comm import contract
from tests.grids import grid

# It starts threads of its own.
CASES = [case for case in contract.CASES if case is not contract.case_many_threads_wait_for_one_work]


@pytest.mark.slow
@grid(case=CASES, size=[1, 2, 3, 4, 7], cover=1)
def test_contract(case: Callable[[Communicator], None], size: int) -> None:
    """The contract of communicators holds in any order."""
    run_ranks(size, case, schedule=Schedule(size))


def exchanges(c: Communicator, seed: int) -> list[torch.Tensor]:
    """Ranks exchange with random partners; each starts its exchanges and waits for them in an order of its own."""
    shared, own = random.Random(seed), random.Random(seed * c.size + c.rank)
    pairs = [(a, b) for a in range(c.size) for b in range(c.size) if a != b and shared.random() < 0.7]
    tags = [shared.random() < 0.5 for _ in pairs]
    mine = [(a, b, int(tag)) for (a, b), tag in zip(pairs, tags, strict=True) if c.rank in (a, b)]
    results = {(a, tag): torch.full((2,), torch.nan) for a, b, tag in mine if b == c.rank}
    own.shuffle(mine)
    works = []
    for a, b, tag in mine:
        sends = a == c.rank
        inputs = {b: torch.tensor([float(a), float(b)])} if sends else {}
        works.append(c.neighbour_exchange({} if sends else {a: results[a, tag]}, inputs, tag))
    total = torch.ones(1)
    works.append(c.all_reduce(total))
    own.shuffle(works)
    for work in works:
        work.wait()
    assert total.item() == c.size
    for (a, _), result in results.items():
        assert result.tolist() == [a, c.rank]
    return list(results.values())


@pytest.mark.slow
def test_two_hundred_orders() -> None:
    """Random exchanges of two to eight ranks end well in every order, and no time passes."""
    orders = set()
    for seed in range(200):
        schedule = Schedule(seed)
        size = 2 + seed % 7
        results = run_ranks(size, exchanges, seed % 11, schedule=schedule)
        assert len(results) == size
        assert schedule.now() == 0
        orders.add(tuple(name for _, name, _ in schedule.trace))
    assert len(orders) > 190


def crossed(c: Communicator, seen: set[bool]) -> None:
    """A faulty protocol: the rank that finds no message takes the other one for late, which it need not be."""
    work = c.recv(torch.empty(1), 1 - c.rank)
    c.send(torch.ones(1), 1 - c.rank)
    seen.add(work.is_completed())


def test_what_depends_on_the_order_shows() -> None:
    """A message is there or not when a rank looks, and some seed among 20 shows each."""
    seen = set[bool]()
    for seed in range(20):
        run_ranks(2, crossed, seen, schedule=Schedule(seed))
    assert seen == {False, True}


def fails(c: Communicator) -> None:
    """Rank 1 raises; the others wait for it, in vain."""
    if c.rank == 1:
        raise ZeroDivisionError("boom")
    c.barrier().wait()


def returns(c: Communicator) -> None:
    """Rank 1 returns; the others wait for it, in vain."""
    if c.rank != 1:
        c.recv(torch.ones(1), 1).wait()


def aborts(c: Communicator) -> None:
    """Rank 1 gives up; the others wait for it, in vain."""
    if c.rank == 1:
        c.abort("enough")
        c.barrier().wait()
    c.neighbour_exchange({1: torch.ones(1)}, {}).wait()


def differs(c: Communicator) -> None:
    """Rank 1 calls another operation."""
    (c.barrier() if c.rank == 1 else c.all_reduce(torch.ones(1))).wait()


LOSSES: dict[Callable[[Communicator], None], tuple[type[CommunicationError], tuple[int, ...], str]] = {
    fails: (RankLostError, (1,), r"rank 1 was lost \(it raised ZeroDivisionError: boom\) during barrier #0"),
    returns: (RankLostError, (1,), r"rank 1 was lost \(its function has returned\) during recv from rank 1"),
    aborts: (RankLostError, (1,), r"rank 1 was lost \(enough\) during recv from rank 1"),
    differs: (MismatchError, (), r"\w+ #0 failed: rank . called .* where rank . called .*: all ranks must issue .*"),
}


@grid(case=list(LOSSES), seed=[None, 0, 1, 2, 3, 4])
def test_losses(case: Callable[[Communicator], None], seed: int | None) -> None:
    """Ranks that a rank fails raise the same errors under a schedule as without one, in any order."""
    kind, ranks, text = LOSSES[case]
    seen = dict[int, CommunicationError]()

    def fn(c: Communicator) -> None:
        try:
            case(c)
        except CommunicationError as error:
            seen[c.rank] = error

    schedule = None if seed is None else Schedule(seed)
    if case is fails:
        with pytest.raises(ZeroDivisionError) as caught:
            run_ranks(4, fn, schedule=schedule)
        assert caught.value.__notes__[0] == "raised by rank 1 of 4"
        assert schedule is None or f"under {schedule!r}" in caught.value.__notes__
    else:
        run_ranks(4, fn, schedule=schedule)
    for rank in (0, 2, 3):
        assert re.fullmatch(text, str(seen[rank]))
        assert isinstance(seen[rank], kind)
        assert seen[rank].ranks == ranks
    assert schedule is None or schedule.now() == 0


@pytest.mark.parametrize("seed", range(5))
def test_timeouts_pass_at_once(seed: int) -> None:
    """Five minutes count from `wait`, for all messages of an exchange together, by the virtual clock.

    All ranks are through after more than 1.5 hours of it, within the limit of a test.
    """
    schedule = Schedule(seed)

    def fn(c: Communicator) -> None:
        if c.rank:
            schedule.sleep(1290)
            if c.rank == 1:
                c.send(torch.ones(1), 0)
            schedule.sleep(5000)
            return
        work = c.neighbour_exchange({1: torch.empty(1), 2: torch.empty(1)}, {})
        schedule.sleep(1000)
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 2 did not end within 300 s") as caught:
            work.wait()
        assert caught.value.ranks == (2,)
        assert schedule.now() == 1300
        with pytest.raises(CollectiveTimeoutError):
            c.barrier().wait()
        assert schedule.now() == 1600

    run_ranks(3, fn, timeout=300, schedule=schedule)
    assert schedule.now() == 6290


def test_a_late_neighbour_is_waited_for() -> None:
    """A message that is sent within the timeout arrives, at the time at which it was sent."""
    schedule = Schedule(0)

    def fn(c: Communicator) -> tuple[float, float]:
        schedule.sleep(299 * c.rank)
        received = torch.empty(1)
        c.neighbour_exchange({1 - c.rank: received}, {1 - c.rank: torch.ones(1) * c.rank}).wait()
        return received.item(), schedule.now()

    assert run_ranks(2, fn, timeout=300, schedule=schedule) == [(1.0, 299.0), (0.0, 299.0)]


def test_many_threads_wait_for_one_work() -> None:
    """The result is written once, and all threads that wait see it, in any order."""

    def fn(c: Communicator, schedule: Schedule) -> list[float]:
        x, seen = torch.full((1,), 8.0), list[float]()
        schedule.sleep(c.rank)
        work = c.all_reduce(x)

        def wait() -> None:
            work.wait()
            seen.append(x.item())

        threads = [schedule.thread(wait, f"thread {number} of {c.rank}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    for seed in range(20):
        schedule = Schedule(seed)
        assert run_ranks(2, fn, schedule, schedule=schedule) == [[16.0] * 4] * 2
