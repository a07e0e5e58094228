"""How a `Schedule` ends threads that cannot go on, and threads that others have started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.comm.backends.local.clock import Condition
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CommunicationError, DeadlockError


class Unending(Pending):
    """A communication of two ranks that nothing ends."""

    def __init__(self, condition: Condition, name: str) -> None:
        super().__init__()
        self.condition = condition
        self.name = name

    def is_completed(self) -> bool:
        return False

    def _complete(self) -> None:
        with self.condition:
            self.condition.wait()


def test_deadlock_is_raised_by_all_at_once_and_names_their_works() -> None:
    """Every waiting thread gets the same message; those that have ended are not in it."""
    schedule = Schedule(5)
    condition, messages = schedule.condition(), list[str]()

    def fn(c: Communicator) -> None:
        c.barrier().wait()
        if c.rank:
            schedule.sleep(c.rank)
            with pytest.raises(DeadlockError) as caught:
                Unending(condition, f"exchange #{c.rank}").wait()
            messages.append(str(caught.value))
            raise caught.value

    began = time.monotonic()
    with pytest.raises(DeadlockError) as raised:
        run_ranks(3, fn, timeout=300, schedule=schedule)
    assert time.monotonic() - began < 10
    first, second = messages
    assert first == second == str(raised.value)
    assert first.startswith(
        "deadlock at 2 s: every thread waits without a deadline: rank 1 waits for exchange #1 (test_"
    )
    assert "; rank 2 waits for exchange #2 (test_schedule_stops.py:" in first
    assert "rank 0" not in first
    assert not isinstance(raised.value, CommunicationError)
    assert any(note.startswith("raised by rank") for note in raised.value.__notes__)
    assert "under Schedule(5) at 2 s after" in raised.value.__notes__[-1]


def test_locks_in_two_orders_are_a_deadlock_under_some_seed() -> None:
    """Two threads take two locks in opposite orders; the message tells who holds what, and the locks are free after it."""

    def run(seed: int) -> str:
        schedule = Schedule(seed)
        first, second = schedule.condition(), schedule.condition()

        def take(outer: Condition, inner: Condition) -> None:
            with outer, inner:
                pass
            with outer:
                pass

        try:
            schedule.run({"a": lambda: take(first, second), "b": lambda: take(second, first)})
        except DeadlockError as error:
            assert len(schedule.errors) == 2
            return str(error)
        return ""

    texts = [run(seed) for seed in range(20)]
    assert 0 < texts.count("") < 20
    text = max(texts)
    assert "a waits in test_locks" in text
    assert "for the lock that b holds (test_schedule_stops.py:" in text
    assert "for the lock that a holds" in text


def test_a_thread_that_was_woken_raises_once_its_lock_is_free() -> None:
    """The holder of the lock raises first, for it waits for something else."""
    schedule = Schedule(0)
    first, second, raised = schedule.condition(), schedule.condition(), list[str]()

    def waits() -> None:
        with first, pytest.raises(DeadlockError, match=r"waits waits in .* for the lock that holds holds"):
            first.wait(1)
        raised.append("waits")

    def holds() -> None:
        schedule.sleep(0.5)
        with first:
            with second, pytest.raises(DeadlockError):
                second.wait()
            raised.append("holds")

    schedule.run({"waits": waits, "holds": holds})
    assert raised == ["holds", "waits"]


def test_a_deadlock_that_is_caught_again_and_again_ends() -> None:
    """Threads that go on waiting are stopped after `most` choices."""
    schedule = Schedule(0, most=50)
    condition = schedule.condition()

    def stubborn() -> None:
        while not schedule.errors:
            with pytest.raises(DeadlockError), condition:
                condition.wait()

    with pytest.raises(DeadlockError, match="50 choices have not moved the clock from 0 s"):
        schedule.run({"a": stubborn, "b": stubborn})


def test_an_endless_loop_is_stopped() -> None:
    """A rank that asks for ever without sleeping is named, as is the place where it waits."""

    def fn(c: Communicator) -> None:
        if c.rank == 0:
            work = c.recv(torch.ones(1), 1)
            while not work.is_completed():
                pass
        else:
            c.recv(torch.ones(1), 0).wait()

    with pytest.raises(
        DeadlockError, match=r"200 choices have not moved the clock from 0 s.*rank 1 waits for recv from"
    ):
        run_ranks(2, fn, schedule=Schedule(0, most=200))


@pytest.mark.parametrize("seed", range(3))
def test_a_thread_that_blocks_elsewhere_is_named(seed: int) -> None:
    """The run ends after `patience` seconds; the other ranks raise, and so does that one when it comes back."""
    elsewhere, errors = threading.Event(), list[str]()
    schedule = Schedule(seed, patience=0.2)

    def fn(c: Communicator) -> None:
        try:
            c.barrier().wait()
            if c.rank == 1:
                schedule.sleep(1)  # the others are waiting then
                elsewhere.wait()
            c.barrier().wait()
        except DeadlockError as error:
            errors.append(str(error))
            raise

    with pytest.raises(DeadlockError, match=r"rank 1 has reached no waiting point for 0.2 s of real time") as caught:
        run_ranks(3, fn, timeout=300, schedule=schedule)
    assert "rank 1 is in test_a_thread_that_blocks_elsewhere_is_named.<locals>.fn (test_sche" in str(caught.value)
    assert "rank 0 waits for barrier #1 until 300 s (test_schedule_stops.py:" in str(caught.value)
    assert len(errors) == 2
    elsewhere.set()
    (thread,) = [each for each in threading.enumerate() if each.name == "rank 1"]
    thread.join(5)
    assert errors == [str(caught.value)] * 3
    assert not [each for each in threading.enumerate() if each.name.startswith("rank ")]


def test_an_unknown_thread_is_refused() -> None:
    """Its waits would be in no order; the message names it and what to use instead."""
    errors = list[str]()

    def fn(c: Communicator) -> None:
        def wait() -> None:
            with pytest.raises(RuntimeError, match=r"'stranger' waits.*schedule.thread\(target, name\)") as caught:
                c.barrier().wait()
            errors.append(str(caught.value))

        thread = threading.Thread(target=wait, name="stranger")
        thread.start()
        thread.join()

    run_ranks(2, fn, schedule=Schedule(0))
    assert len(errors) == 2


def courier(c: Communicator, schedule: Schedule) -> list[object]:
    """A rank whose messages are received by a thread of its own, which sleeps before."""
    received, heard = torch.empty(1), list[object]()

    def receive() -> None:
        schedule.sleep(7)
        c.recv(received, 1 - c.rank).wait()

    thread = schedule.thread(receive, f"courier {c.rank}")
    heard.append(thread.is_alive())
    thread.start()
    c.send(torch.ones(1) * c.rank, 1 - c.rank).wait()
    thread.join(2)
    heard += [thread.is_alive(), schedule.now()]
    thread.join()
    thread.join()
    return [*heard, thread.is_alive(), schedule.now(), received.item()]


def test_ranks_start_threads() -> None:
    """A started thread is in the trace, and `join` waits in virtual time."""
    traces = []
    for _ in range(2):
        schedule = Schedule(1)
        expected = [False, True, 2.0, False, 7.0]
        assert run_ranks(2, courier, schedule, schedule=schedule) == [[*expected, 1.0], [*expected, 0.0]]
        traces.append(schedule.trace)
    assert traces[0] == traces[1]
    assert {name for _, name, _ in traces[0]} == {"rank 0", "rank 1", "courier 0", "courier 1"}


def start(c: Communicator, schedule: Schedule, target: Callable[[], object]) -> None:
    """A rank that starts a thread and returns."""
    schedule.thread(target, f"courier {c.rank}").start()
    schedule.sleep(1)


def test_the_error_of_a_started_thread_is_raised() -> None:
    """The first error by time counts, although the ranks have raised theirs since."""
    schedule = Schedule(0)

    def fn(c: Communicator) -> None:
        start(c, schedule, lambda: 1 / c.rank)
        raise ValueError("later")

    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks(2, fn, schedule=schedule)
    assert caught.value.__notes__[0] == "raised by thread 'courier 0'"


def test_started_threads_end_before_the_run() -> None:
    """One that sleeps is waited for; one that waits for ever, or wakes again and again, is an error."""
    schedule, ended = Schedule(0), list[float]()

    def sleep() -> None:
        schedule.sleep(10)
        ended.append(schedule.now())

    run_ranks(2, start, schedule, sleep, schedule=schedule)
    assert ended == [10.0, 10.0]

    schedule = Schedule(0)
    with pytest.raises(DeadlockError, match=r"courier . waits in Unending.*; courier . waits in Unending"):
        run_ranks(2, start, schedule, lambda: Unending(schedule.condition(), "").wait(), schedule=schedule)

    def wake() -> None:
        while True:
            schedule.sleep(1)

    schedule = Schedule(0, most=50)
    with pytest.raises(
        DeadlockError, match="after the end of all functions of the run, threads that they started still run"
    ):
        run_ranks(2, start, schedule, wake, schedule=schedule)


def test_a_stopped_schedule_is_not_used_again() -> None:
    """Its threads have raised in between, so nothing that it protects can be relied upon."""
    schedule = Schedule(0, most=10)
    with pytest.raises(DeadlockError):
        schedule.run({"a": lambda: [schedule.pass_on() for _ in range(20)]})
    with pytest.raises(RuntimeError, match="was stopped: make another one"):
        schedule.run({"a": int})
    for call in (schedule.pass_on, schedule.condition().acquire, schedule.thread(int, "b").start):
        with pytest.raises(DeadlockError):
            call()


def test_an_interruption_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the caller of `run`; its threads raise at their next waiting points."""
    schedule, errors = Schedule(0), list[str]()

    def loop() -> None:
        try:
            while True:
                schedule.sleep(1)
        except DeadlockError as error:
            errors.append(str(error))

    def interrupt() -> None:
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(schedule, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        schedule.run({"a": loop, "b": loop})
    for thread in [each for each in threading.enumerate() if each.name in ("a", "b")]:
        thread.join(5)
    assert errors == ["the thread that called run() raised KeyboardInterrupt()"] * 2
