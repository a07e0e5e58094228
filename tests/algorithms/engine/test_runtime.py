"""Threads that run exchanges: what they raise, and in which order they start."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from bagua_kernels.algorithms.engine.runtime import Runtime
from bagua_kernels.comm import Work
from bagua_kernels.errors import RankLostError
from tests import limits


def losing() -> Iterator[Work]:
    """Loses rank 2."""
    yield from ()
    raise RankLostError("rank 2 was lost", [2])


def test_exchanges_after_a_failure_fail_alike() -> None:
    """The kind of the first error and its ranks stay, for whoever sees the second one decides by them."""
    runtime = Runtime(torch.device("cpu"), 1, 1)
    tasks = [runtime.start(0, losing, "test") for _ in range(3)]
    for task in tasks:
        assert task.done.wait(limits.seconds(10))
        assert isinstance(task.error, RankLostError)
        assert task.error.ranks == (2,)
        assert "rank 2 was lost" in str(task.error)
    assert [task.follows for task in tasks] == [False, True, True]
    runtime.close()


def test_exchanges_of_one_connection_start_in_order() -> None:
    """The second one starts while the first one waits, the third one when a slot is free."""
    log: list[str] = []
    open_gates = [threading.Event() for _ in range(3)]

    class Gate(Work):
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            assert open_gates[self.number].wait(limits.seconds(10))

        def is_completed(self) -> bool:
            return open_gates[self.number].is_set()

    def run(number: int) -> Iterator[Work]:
        log.append(f"start {number}")
        open_gates[number].set() if number == 2 else None
        yield Gate(number)
        log.append(f"end {number}")

    runtime = Runtime(torch.device("cpu"), 2, 1)
    tasks = [runtime.start(number, lambda number=number: run(number), "test") for number in range(3)]
    while len(log) < 2:
        threading.Event().wait(0.001)
    assert log == ["start 0", "start 1"]
    open_gates[1].set()
    assert tasks[1].done.wait(limits.seconds(10))
    assert tasks[2].done.wait(limits.seconds(10))
    assert not tasks[0].done.is_set()
    open_gates[0].set()
    assert tasks[0].done.wait(limits.seconds(10))
    assert log.index("start 2") > log.index("end 1")
    runtime.close()
