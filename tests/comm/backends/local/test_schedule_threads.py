"""Threads that the functions of a `Schedule` start."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.errors import DeadlockError


def test_an_unknown_thread_is_refused() -> None:
    """Its waits would be in no order; the message names it and what to use instead."""
    errors, schedule = list[str](), Schedule(0)

    def fn(c: Communicator) -> None:
        def wait() -> None:
            with pytest.raises(RuntimeError, match=r"'stranger' waits.*schedule.thread\(target, name\)") as caught:
                c.barrier().wait()
            errors.append(str(caught.value))
            with pytest.raises(RuntimeError, match="'stranger' waits"):
                schedule.thread(int, "friend of a stranger").start()

        thread = threading.Thread(target=wait, name="stranger")
        thread.start()
        thread.join()

    run_ranks(2, fn, schedule=schedule)
    assert len(errors) == 2


def courier(c: Communicator, schedule: Schedule) -> list[object]:
    """A rank whose messages are received by a thread of its own, which sleeps before."""
    received, heard = torch.empty(1), list[object]()

    def receive() -> None:
        schedule.sleep(700)
        c.recv(received, 1 - c.rank).wait()

    thread = schedule.thread(receive, f"courier {c.rank}")
    heard.append(thread.is_alive())
    thread.start()
    c.send(torch.ones(1) * c.rank, 1 - c.rank).wait()
    thread.join(200)
    heard += [thread.is_alive(), schedule.now()]
    thread.join()
    thread.join()
    return [*heard, thread.is_alive(), schedule.now(), received.item()]


def test_ranks_start_threads() -> None:
    """A started thread is in the trace, and `join` waits in virtual time."""
    traces = []
    for _ in range(2):
        schedule = Schedule(1)
        expected = [False, True, 200.0, False, 700.0]
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
    condition = schedule.condition()

    def waits() -> None:
        with condition:
            condition.wait()

    with pytest.raises(DeadlockError, match=r"courier . waits in .*waits \(test_.*; courier . waits in .*waits"):
        run_ranks(2, start, schedule, waits, schedule=schedule)

    def wakes() -> None:
        while True:
            schedule.sleep(1)

    schedule = Schedule(0, most=50)
    with pytest.raises(
        DeadlockError, match="50 choices after the end of all functions of the run, threads that they st"
    ):
        run_ranks(2, start, schedule, wakes, schedule=schedule)


def test_the_limit_of_choices_begins_anew_when_the_functions_have_ended() -> None:
    """A thread that goes on after them has all of it."""
    schedule = Schedule(0, most=50)
    condition = schedule.condition()

    def steps() -> None:
        for _ in range(40):
            schedule.pass_on()

    def follows() -> None:
        with condition:
            condition.wait()
        steps()

    def fn() -> None:
        schedule.thread(follows, "b").start()
        steps()
        with condition:
            condition.notify_all()

    schedule.run({"a": fn})
    assert len(schedule.trace) > 80
