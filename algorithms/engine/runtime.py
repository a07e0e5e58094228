"""Threads that run exchanges beside training."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from bagua_kernels.comm import Work
from bagua_kernels.errors import follow_up

# Does what is to be done for one bucket, and yields each collective that is to be waited for.
Run = Callable[[], Iterator[Work]]


@dataclass
class Task:
    """One exchange of one bucket.

    Attributes:
        run: what to do; dropped when it is done.
        device: of the bucket.
        label: what profilers call it.
        several: True if it takes several collectives, between which no other exchange may start one on a shared communicator.
        done: set when the exchange has ended, well or not.
        error: what went wrong.
        follows: True if `error` only means that an exchange before this one failed.
        began: when the exchange began, by `time.perf_counter`.
        ended: when it ended.
        ready: on a GPU, recorded when the gradients are in the bucket.
        finished: on a GPU, recorded when the means are.
    """

    run: Run
    device: torch.device
    label: str
    several: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    follows: bool = False
    began: float = 0.0
    ended: float = 0.0
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None

    def check(self) -> None:
        """To be called when it is done: raises what went wrong, and has the current stream wait for the means."""
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self.finished)


@dataclass
class _Connection:
    """What the threads of one communicator share.

    Attributes:
        tasks: to be started in their order; None ends all threads.
        turn: held by the thread that takes a task and starts its first collective.
        failure: of the first thing that went wrong: after it the ranks no longer agree on what comes next.
    """

    tasks: queue.SimpleQueue[Task | None] = field(default_factory=queue.SimpleQueue)
    turn: threading.Lock = field(default_factory=threading.Lock)
    failure: RuntimeError | None = None


class Runtime:
    """Runs up to `in_flight` exchanges at a time: bucket k belongs to slot k % in_flight.

    A slot is a thread with a communicator of its own, or with one that all slots share if exchanges make one collective each.
    On a communicator exchanges start in the order in which they are given. So all ranks start its collectives in one
    order; otherwise those of different buckets would meet. The next one starts when the one before it has ended or, on
    a shared communicator, when that waits for its only collective.
    """

    def __init__(self, device: torch.device, in_flight: int, connections: int) -> None:
        """Starts the threads, which end with this object.

        Args:
            device: of the buckets.
            in_flight: exchanges at a time.
            connections: communicators, 1 or `in_flight`.
        """
        self._device, self._most, self._in_flight = device, in_flight, in_flight
        self._connections = [_Connection() for _ in range(connections)]
        threads = [
            threading.Thread(
                target=_work,
                args=(self._connections[slot % connections], device),
                name="bagua_kernels communication",
                daemon=True,
            )
            for slot in range(in_flight)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end_threads, self._connections, threads)

    def limit(self, in_flight: int | None) -> int:
        """Runs fewer exchanges at a time from now on, or as many as at first if None; returns how many. None is under way."""
        self._in_flight = min(in_flight or self._most, self._most)
        return self._in_flight

    def start(self, index: int, run: Run, label: str, several: bool = False) -> Task:
        """Queues the exchange of a bucket, whose gradients the current stream or `run` itself brings there."""
        # One at a time keeps its turn until it has ended, where others have the same communicator.
        task = Task(run, self._device, label, several or self._in_flight == 1)
        if self._device.type == "cuda":
            task.ready = torch.cuda.Event()
            task.ready.record(torch.cuda.current_stream(self._device))
        self._connections[index % min(self._in_flight, len(self._connections))].tasks.put(task)
        return task


def _end_threads(connections: list[_Connection], threads: list[threading.Thread]) -> None:
    """Ends threads and waits for them: a thread that outlives the interpreter ends the process with an abort."""
    for connection in connections:
        connection.tasks.put(None)
    # Where the last reference goes on one of them, the others may wait for its turn.
    if threading.current_thread() not in threads:
        # An exchange that hangs is released by its communicator, at the latest when that is shut down.
        limit = time.monotonic() + 10.0
        for thread in threads:
            thread.join(timeout=max(0.0, limit - time.monotonic()))


def _work(connection: _Connection, device: torch.device) -> None:
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    while True:
        with contextlib.ExitStack() as turn:
            turn.enter_context(connection.turn)
            task = connection.tasks.get()
            if task is None:
                connection.tasks.put(None)
                return
            task.began = time.perf_counter()
            try:
                if connection.failure is not None:
                    task.follows = True
                    raise follow_up(connection.failure, f"an exchange before this one failed: {connection.failure}")
                _drain(task, stream, started=turn.close)
            except BaseException as error:
                # The error itself is not kept: its traceback holds the exchange.
                task.error, connection.failure = error, connection.failure or follow_up(error, f"{error!r}")
            finally:
                task.ended = time.perf_counter()
                task.run = nothing  # instead of what holds the exchange
                task.done.set()
        # Waiting for the next task must not keep this one's tensors alive.
        del task


def nothing() -> Iterator[Work]:
    """Does nothing for a bucket."""
    yield from ()


def _drain(task: Task, stream: torch.cuda.Stream | None, started: Callable[[], None]) -> None:
    if stream is None or task.ready is None:
        with torch.profiler.record_function(task.label):
            for work in task.run():
                if not task.several:
                    started()
                work.wait()
        return
    with torch.cuda.stream(stream), torch.profiler.record_function(task.label), torch.cuda.nvtx.range(task.label):
        stream.wait_event(task.ready)
        for work in task.run():
            work.wait()  # has the stream wait
        task.finished = torch.cuda.Event()
        task.finished.record(stream)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what spans cover together."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
