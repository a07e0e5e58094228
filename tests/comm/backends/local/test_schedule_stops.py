"""How a `Schedule` ends threads that cannot go on."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.comm.mailbox.clock import Condition
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CommunicationError, DeadlockError
from tests import limits


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
    """Every waiting thread gets the same message; those that have ended are not in it. No timeout is waited for."""
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

    with pytest.raises(DeadlockError) as raised:
        run_ranks(3, fn, timeout=limits.NEVER, schedule=schedule)
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


def test_the_lock_of_a_thread_that_has_ended_is_never_free() -> None:
    """The thread that needs it after its wait is stopped, for nothing can give it back its lock."""
    schedule = Schedule(0)
    condition = schedule.condition()

    def waits() -> None:
        with condition:
            condition.wait(1)

    def ends() -> None:
        schedule.sleep(0.5)
        condition.acquire()

    with pytest.raises(DeadlockError, match=r"deadlock at 1 s: .*: waits waits in .* for the lock that ends holds"):
        schedule.run({"waits": waits, "ends": ends})


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
    schedule = Schedule(seed, patience=0.5)

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

    with pytest.raises(DeadlockError, match=r"rank 1 has reached no waiting point for 0.5 s of real time") as caught:
        run_ranks(3, fn, timeout=300, schedule=schedule)
    assert "rank 1 is in test_a_thread_that_blocks_elsewhere_is_named.<locals>.fn (test_sche" in str(caught.value)
    assert "rank 0 waits for barrier #1 until 300 s (test_schedule_stops.py:" in str(caught.value)
    assert len(errors) == 2
    elsewhere.set()
    (thread,) = [each for each in threading.enumerate() if each.name == "rank 1"]
    thread.join(limits.seconds(5))
    assert errors == [str(caught.value)] * 3
    assert not [each for each in threading.enumerate() if each.name.startswith("rank ")]


def test_a_stopped_thread_keeps_its_own_error() -> None:
    """What it raises with a lock in its hands is not replaced when it releases the lock of a stopped schedule."""
    elsewhere, schedule = threading.Event(), Schedule(0, patience=0.1)
    condition = schedule.condition()

    def fn() -> None:
        with condition:
            elsewhere.wait()
            raise ValueError("own")

    with pytest.raises(DeadlockError, match=r"a has reached no waiting point for 0.1 s"):
        schedule.run({"a": fn})
    elsewhere.set()
    for thread in [each for each in threading.enumerate() if each.name == "a"]:
        thread.join(limits.seconds(5))
    assert [type(error) for error in schedule.errors] == [DeadlockError, ValueError]


def test_patience_counts_from_the_last_waiting_point() -> None:
    """A run may take longer than any of its threads between two waiting points."""
    schedule = Schedule(0, patience=1.0)

    def fn() -> None:
        for _ in range(30):
            time.sleep(0.02)
            schedule.pass_on()

    schedule.run({"a": fn, "b": fn})


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
        thread.join(limits.seconds(5))
    assert errors == ["the thread that called run() raised KeyboardInterrupt()"] * 2
