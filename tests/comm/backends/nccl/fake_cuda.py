"""A stand-in for the streams, events and captures of `torch.cuda`, for ranks that are threads.

A stream that was made is a queue, whose work runs in order and once it can. The stream that is current by default is
the rank's own thread, which does everything at once, and blocks for what it is told to wait for. `MisuseError` is raised
on all ranks for what CUDA would punish by a hang, by garbage or by an error: host waits and queries for captured events,
captures that are not joined, memory that no tensor recorded on the stream owns. `fake_memory` follows memory that is freed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tests import limits
from tests.comm.backends.nccl.fake_memory import Memory, Timeline

LIMIT = limits.seconds(30)  # seconds that a rank's thread waits for the simulated GPU


class MisuseError(AssertionError):
    """The libraries were used wrongly."""


class Machine:
    """What the GPUs share: one lock, and the first misuse.

    Attributes:
        stalled: names of operations that are stuck on the GPU.
        again: whether something has moved, so that streams that were stuck may not be any more.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.failure = ""
        self.again = False
        self.stalled: set[str] = set()
        self.cudas: list[Cuda] = []

    def fail(self, text: str) -> NoReturn:
        self.note_failure(text)
        raise MisuseError(self.failure)

    def note_failure(self, text: str) -> None:
        """Lets the next operation of each rank raise `MisuseError`."""
        with self.changed:
            self.failure = self.failure or text
            self.changed.notify_all()

    def raise_failure(self) -> None:
        if self.failure:
            raise MisuseError(self.failure)

    def block(self, ready: Callable[[], bool], what: str) -> None:
        """Waits; the caller holds the lock."""
        deadline = time.monotonic() + LIMIT
        while not ready():
            self.raise_failure()
            if time.monotonic() > deadline:
                self.fail(f"waited {LIMIT:g} s for {what}")
            self.changed.wait(0.1)

    def progress(self) -> None:
        """Runs what can run on any stream; the caller holds the lock."""
        self.again = True
        while self.again:
            self.again = False
            for stream in [stream for cuda in self.cudas for stream in list(cuda.streams.values())]:
                if stream.step():
                    self.again = True
        self.changed.notify_all()

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Runs a function on a thread for each rank; the first to raise ends the others, and is raised."""
        results: list[Any] = [None] * len(self.cudas)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except BaseException as error:
                with self.changed:
                    errors.append(error)
                    self.failure = self.failure or f"rank {rank} raised {error!r}"
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
        for error in errors:
            raise error
        assert not any(thread.is_alive() for thread in threads)
        return results

    def heads(self) -> list[Any]:
        """What each busy stream is at."""
        return [stream.queue[0] for cuda in self.cudas for stream in cuda.streams.values() if stream.queue]


class Event:
    """A point in the work of a stream."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream: Stream | None = None
        self.clock: dict[int, int] = {}
        self.done = True
        self.captured = False
        self.queries = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = self.cuda.current_stream() if stream is None else stream
        self.cuda.enter("Event.record")
        with self.cuda.machine.changed:
            self.clock = dict(stream.timeline.clock)
            self.stream, self.done, self.captured = stream, False, stream.capturing
            stream.put(Record(self))

    def query(self) -> bool:
        with self.cuda.machine.changed:
            if self.captured:
                self.cuda.machine.fail("an event that was recorded in a capture was queried")
            self.queries += 1
            return self.done


@dataclass(eq=False)
class Record:
    event: Event
    name = "record"

    def run(self) -> bool:
        self.event.done = True
        return True


@dataclass(eq=False)
class Wait:
    event: Event
    name = "wait"

    def run(self) -> bool:
        return self.event.done


class Stream:
    """A queue of work: things with a `name` and a `run` that returns whether it is done.

    Attributes:
        own: it is the rank's own thread.
        device: whose index the stream belongs to.
        timeline: its operations, for `Memory`.
        recorded: the tensors that were recorded on it since the last event.
        log: the names of all work that it was given.
    """

    def __init__(self, cuda: Cuda, *, own: bool = False, device: torch.device | None = None) -> None:
        self.cuda = cuda
        self.own = own
        self.device = device
        self.capturing = False
        self.queue: deque[Any] = deque()
        self.recorded: list[torch.Tensor] = []
        self.log: list[str] = []
        self.cuda_stream = next(cuda.handles)
        self.timeline = Timeline(self.cuda_stream, f"stream {self.cuda_stream} of {threading.current_thread().name!r}")
        cuda.streams[self.cuda_stream] = self

    def wait_event(self, event: Event) -> None:
        self.cuda.enter("Stream.wait_event")
        with self.cuda.machine.changed:
            if event.captured:
                self.capturing = True
            elif self.capturing:
                self.cuda.machine.fail("a captured stream was made to wait for an event from outside the capture")
            self.timeline.wait_for(event.clock)
            self.put(Wait(event))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        with self.cuda.machine.changed:
            self.cuda.machine.block(lambda: not self.queue, "a stream")
            self.cuda.memory.end(self.timeline)

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record(self)
        return event

    def put(self, item: Any) -> None:
        self.log.append(item.name)
        if isinstance(item, Record):
            self.recorded = []
        if self.capturing:
            self.cuda.graph.append((self, item))
        elif self.own:
            self.cuda.machine.block(item.run, f"a {item.name}")
            self.cuda.machine.progress()
        else:
            self.queue.append(item)
            self.cuda.machine.progress()

    def step(self) -> bool:
        """Runs the next piece of work if it can; returns whether it did."""
        if not self.queue or self.queue[0].name in self.cuda.machine.stalled or not self.queue[0].run():
            return False
        self.queue.popleft()
        return True


class Cuda:
    """One rank's `torch.cuda`.

    Attributes:
        memory: which streams use which tensors.
        records: all calls of `record_stream`.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.handles = itertools.count(1 + 1000 * len(machine.cudas))
        self.streams: dict[int, Stream] = {}
        self.priorities: list[int] = []
        self.records: list[tuple[torch.Tensor, Stream]] = []
        self.graph: list[tuple[Stream, Any]] = []
        self.threads = threading.local()
        self.memory = Memory(machine.changed, machine.note_failure)
        machine.cudas.append(self)

    def enter(self, what: str) -> None:
        """Called before work is put on a stream."""
        self.machine.raise_failure()

    def Stream(self, device: torch.device, priority: int = 0) -> Stream:
        self.priorities.append(priority)
        return Stream(self, device=device)

    def Event(self) -> Event:
        return Event(self)

    def set_device(self, device: torch.device | int) -> None:
        self.threads.device = torch.device("cuda", device) if isinstance(device, int) else device

    def current_device(self) -> int:
        return getattr(self.threads, "device", torch.device("cpu")).index or 0

    def _streams(self) -> dict[int, Stream]:
        """The thread's current stream of each device, by index."""
        if not hasattr(self.threads, "streams"):
            self.threads.streams = {}
        streams: dict[int, Stream] = self.threads.streams
        return streams

    def current_stream(self, device: torch.device | None = None) -> Stream:
        index = self.current_device() if device is None or device.index is None else device.index
        if index not in self._streams():
            with self.machine.changed:
                self._streams()[index] = Stream(self, own=True, device=torch.device("cuda", index))
        return self._streams()[index]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the current one of its device."""
        index = self.current_device() if stream.device is None or stream.device.index is None else stream.device.index
        before = self.current_stream(torch.device("cuda", index))
        self._streams()[index] = stream
        try:
            yield
        finally:
            self._streams()[index] = before

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().capturing

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`torch.Tensor.record_stream`."""
        if stream.capturing:
            self.machine.fail("record_stream was called in a capture")
        stream.recorded.append(tensor)
        self.memory.record(tensor, stream.timeline)
        self.records.append((tensor, stream))

    @contextmanager
    def capture(self) -> Iterator[list[tuple[Stream, Any]]]:
        """Captures what the thread's current stream, and those that wait for it, are given."""
        own = self.current_stream()
        own.capturing, self.graph = True, []
        yield self.graph
        forked = {stream for stream, _ in self.graph if stream is not own}
        joined = {item.event.stream for stream, item in self.graph if stream is own and isinstance(item, Wait)}
        for stream in (own, *forked):
            stream.capturing = False
        if not forked <= joined:
            self.machine.fail("the capture ended before its stream had waited for the one that forked from it")

    def replay(self, graph: list[tuple[Stream, Any]]) -> None:
        """Runs a captured graph, and waits for it."""
        with self.machine.changed:
            for stream, item in graph:
                if isinstance(item, Record):
                    item.event.done = stream.own
                elif not isinstance(item, Wait):
                    item.reset()
            for stream, item in graph:
                if not stream.own:
                    stream.queue.append(item)
            self.machine.progress()
            self.machine.block(lambda: all(not stream.queue for stream, _ in graph if not stream.own), "a graph")
