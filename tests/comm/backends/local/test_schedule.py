"""The order of threads under a `Schedule`, its clock, and its conditions."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.comm.mailbox.clock import Clock, RealClock


def ring(c: Communicator) -> float:
    """Passes numbers along a ring, and adds them up."""
    total = torch.zeros(1)
    for step in range(3):
        received = torch.empty(1)
        c.neighbour_exchange({(c.rank - 1) % c.size: received}, {(c.rank + 1) % c.size: torch.ones(1) * c.rank}).wait()
        total += received * 10**step
    c.all_reduce(total).wait()
    return total.item()


def each(functions: list[Callable[[], object]]) -> dict[str, Callable[[], object]]:
    return {f"t{number}": function for number, function in enumerate(functions)}


def test_equal_seeds_give_equal_orders() -> None:
    """The traces are equal line by line, and other seeds give other traces."""
    traces = []
    for seed in [*range(8), *range(8)]:
        schedule = Schedule(seed)
        assert run_ranks(4, ring, schedule=schedule) == [666.0] * 4
        traces.append(schedule.trace)
    assert traces[:8] == traces[8:]
    assert all(one != other for one, other in itertools.combinations(traces[:8], 2))
    assert {name for _, name, _ in traces[0]} == {f"rank {rank}" for rank in range(4)}
    assert {point for _, _, point in traces[0]} == {"start", "acquire", "wait", "notify"}


def test_every_order_occurs() -> None:
    """Four threads of one step each run in all 24 orders, about equally often."""
    counts: dict[str, int] = {}
    for seed in range(480):
        order: list[str] = []
        Schedule(seed).run(each([functools.partial(order.append, name) for name in "abcd"]))
        counts["".join(order)] = counts.get("".join(order), 0) + 1
    assert set(counts) == {"".join(order) for order in itertools.permutations("abcd")}
    assert 6 <= min(counts.values()) <= max(counts.values()) <= 45


def counts_up(schedule: Schedule, locked: bool) -> int:
    """Three threads count to six together, by reading and writing; the lock is held from one to the other or not."""
    condition, number = schedule.condition(), [0]

    def count() -> None:
        for _ in range(2):
            if locked:
                with condition:
                    before = number[0]
                    condition.notify_all()
                    number[0] = before + 1
            else:
                with condition:
                    before = number[0]
                with condition:
                    number[0] = before + 1

    schedule.run(each([count] * 3))
    return number[0]


def test_races_are_found() -> None:
    """A counter that loses updates does so in many of 50 orders, not in all; one that holds its lock never does."""
    racy = [counts_up(Schedule(seed), locked=False) for seed in range(50)]
    assert 10 <= sum(number < 6 for number in racy) < 50
    assert all(counts_up(Schedule(seed), locked=True) == 6 for seed in range(50))


def test_pass_on_is_a_waiting_point() -> None:
    """Without it a read and a write are never torn apart; with it they are, under some seed."""

    def torn(seed: int, passes: bool) -> bool:
        schedule, number = Schedule(seed), [0]

        def count() -> None:
            before = number[0]
            if passes:
                schedule.pass_on()
            number[0] = before + 1

        schedule.run(each([count] * 2))
        return number[0] < 2

    assert any(torn(seed, True) for seed in range(20))
    assert not any(torn(seed, False) for seed in range(20))


def test_clock_jumps_to_the_earliest_deadline() -> None:
    """Ten hours pass within the limit of a test; threads wake in the order of their times, whatever the seed."""
    for seed in range(10):
        schedule = Schedule(seed)
        woken: list[tuple[float, int]] = []

        def sleep(seconds: int, schedule: Schedule = schedule, woken: list[tuple[float, int]] = woken) -> None:
            schedule.sleep(seconds)
            woken.append((schedule.now(), seconds))

        schedule.run(each([functools.partial(sleep, seconds) for seconds in (3600, 5, 70, 0)]))
        assert woken == [(0.0, 0), (5.0, 5), (70.0, 70), (3600.0, 3600)]


def test_computing_takes_no_virtual_time() -> None:
    """A thread that can run keeps the clock from moving, however long it takes."""
    schedule, seen = Schedule(0), []
    condition = schedule.condition()

    def waits() -> None:
        with condition:
            seen.append(condition.wait(1e-6))

    def computes() -> None:
        for _ in range(50):
            schedule.pass_on()
            time.sleep(0.0002)
        with condition:
            condition.notify_all()

    schedule.run(each([waits, computes]))
    assert seen == [True]
    assert schedule.now() == 0.0


def waiting_and_waking(clock: Clock, run: Callable[[dict[str, Callable[[], object]]], None]) -> list[object]:
    """One thread waits twice, holding its lock twice; another one wakes it the first time only."""
    condition, seen = clock.condition(), list[object]()
    asked = [False]

    def waits() -> None:
        with condition, condition:
            asked[0] = True
            condition.notify_all()
            while asked[0]:
                seen.append(condition.wait(20))
            seen.append(condition.wait(0.05))
            seen.append(condition.wait(0))
            seen.append(condition.wait(-1))

    def wakes() -> None:
        with condition:
            while not asked[0]:
                condition.wait()
            asked[0] = False
            condition.notify_all()
        with condition:  # the other one holds it, or waits
            seen.append("free")

    run({"waits": waits, "wakes": wakes})
    seen.remove("free")
    return seen


def test_conditions_are_those_of_threading() -> None:
    """`wait` releases a lock that is held twice, takes it as often again, and returns False only if time ran out."""

    def run(targets: dict[str, Callable[[], object]]) -> None:
        threads = [RealClock().thread(target, name) for name, target in targets.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert waiting_and_waking(RealClock(), run) == [True, False, False, False]
    for seed in range(30):
        schedule = Schedule(seed)
        assert waiting_and_waking(schedule, schedule.run) == [True, False, False, False]
        assert schedule.now() == 0.05


def test_a_condition_needs_its_lock() -> None:
    """As with threading: releasing, waiting and waking are errors without the lock."""
    schedule = Schedule(0)
    condition = schedule.condition()

    def fn() -> None:
        for call in (condition.release, condition.notify_all, condition.wait):
            with pytest.raises(RuntimeError, match="t0 does not hold the lock"):
                call()

    schedule.run(each([fn]))


def test_runs_follow_one_another() -> None:
    """The second run goes on at the time of the first; between runs conditions may be taken, but not waited for."""
    schedule = Schedule(3)
    condition = schedule.condition()
    schedule.run({})
    schedule.run(each([lambda: schedule.sleep(2)]))
    with condition:
        condition.notify_all()
        with pytest.raises(RuntimeError, match="'MainThread' waits by the clock of a Schedule that has not started it"):
            condition.wait(1)
    with pytest.raises(ZeroDivisionError):
        schedule.run(each([lambda: 1 / 0]))
    schedule.run(each([lambda: schedule.sleep(3)]))
    assert schedule.now() == 5.0
    assert repr(schedule) == "Schedule(3) at 5 s after 5 choices"
