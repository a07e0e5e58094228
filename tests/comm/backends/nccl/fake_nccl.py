"""A stand-in for `cupy.cuda.nccl` over the streams of `fake_cuda`, which moves real data in the CPU's memory.

Work runs only when NCCL's would: a collective when it is next on the stream of every rank, a send when the receive is in
a group that is next on the peer's stream. `MisuseError` is raised on all ranks for collectives that differ between ranks,
sends and receives that do not fit, ranks that wait for one another in a circle, unbalanced groups, and communicators that
are no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_kernels.comm.backends.nccl.binding import Runtime
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator as Communicator
from bagua_kernels.comm.failures.records import Records
from tests.comm.backends.nccl.fake_cuda import LIMIT, Cuda, Machine, MisuseError, Stream
from tests.comm.backends.nccl.heartbeat_clock import HeartbeatClock

CONSTANTS = {
    "NCCL_INT8": 0,
    "NCCL_UINT8": 1,
    "NCCL_INT32": 2,
    "NCCL_INT64": 4,
    "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7,
    "NCCL_FLOAT64": 8,
    "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0,
    "NCCL_PROD": 1,
    "NCCL_MAX": 2,
    "NCCL_MIN": 3,
}
_DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_COMBINE: dict[int, Callable[..., torch.Tensor]] = {0: torch.add, 1: torch.mul, 2: torch.maximum, 3: torch.minimum}
NAMELESS = 7


class FakeNcclError(RuntimeError):
    """What NCCL itself reports."""


class World(Machine):
    """Ranks with a GPU each.

    Attributes:
        is_over: ranks that wait for others, which do not come to a communicator, wait no more.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.is_over = False
        self.meetings: dict[Any, Meeting] = {}
        self.ids = itertools.count(1)
        self.gpus = [Gpu(self) for _ in range(size)]

    def end(self) -> None:
        """Ends the waits for ranks that do not come to a communicator, which nobody can abort; raises the first misuse."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        self.raise_failure()

    def runtime(self, rank: int) -> Runtime:
        gpu = self.gpus[rank]
        return Runtime(gpu, gpu, gpu.record_stream, lambda: None, partial(gpu.Stream, priority=-1))

    def progress(self) -> None:
        super().progress()
        stuck = [item for item in self.heads() if isinstance(item, Operation) and item.name not in self.stalled]
        edges = {item: [other for other in stuck if item.waits_for(other)] for item in stuck}
        while free := [item for item, others in edges.items() if not others]:
            edges = {item: [o for o in others if o not in free] for item, others in edges.items() if item not in free}
        if edges:
            told = ", ".join(sorted(f"rank {item.communicator.rank} in {item.name}" for item in edges))
            self.fail(f"ranks wait for one another in a circle, put sends and receives into one group: {told}")


class Gpu(Cuda):
    """One rank's `torch.cuda` and `cupy.cuda.nccl` at once.

    Attributes:
        async_error: the status that `check_async_error` reports; CuPy has no name for those from `NAMELESS` on.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.world = world
        self.async_error = 0
        self.communicators: list[NcclCommunicator] = []
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def get_unique_id(self) -> bytes:
        return next(self.world.ids).to_bytes(128, "big")

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> NcclCommunicator:
        if not hasattr(self.threads, "device"):
            self.world.fail("a communicator was made on a thread that has not set its device")
        return NcclCommunicator(self, ndev, commId, rank)

    def groupStart(self) -> None:
        self.enter("groupStart")
        self.threads.group = {}

    def groupEnd(self) -> None:
        group, self.threads.group = self.group, None
        if group is None:
            self.world.fail("groupEnd without groupStart")
        with self.world.changed:
            for (_, stream), operation in group.items():
                stream.put(operation.reset())

    @property
    def group(self) -> dict[tuple[Any, Stream], Operation] | None:
        return getattr(self.threads, "group", None)

    def enter(self, what: str) -> None:
        super().enter(what)
        if self.group is not None:
            self.world.fail(f"{what} within a group, whose work is issued only when it ends")


@dataclass
class Meeting:
    """The ranks of one communicator, and the collectives that they have called so far."""

    size: int
    members: dict[int, NcclCommunicator] = field(default_factory=dict)
    calls: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)


@dataclass
class Buffer:
    """Memory, and the tensor that keeps it from being freed."""

    peer: int
    dtype: int
    data: torch.Tensor
    owner: torch.Tensor | None


@dataclass(eq=False)
class Operation:
    """A collective, or a group of sends and receives, of one rank."""

    name: str
    communicator: NcclCommunicator
    number: int = -1
    work: Callable[[list[Operation]], None] | None = None
    input: Buffer | None = None
    output: Buffer | None = None
    sends: list[Buffer] = field(default_factory=list)
    recvs: list[Buffer] = field(default_factory=list)
    done: bool = False

    def reset(self) -> Operation:
        self.done, self.to, self.of = False, list(self.sends), list(self.recvs)
        return self

    def run(self) -> bool:
        if self.done:
            return True
        return self.run_messages() if self.work is None else self.run_collective()

    def run_collective(self) -> bool:
        heads = [item for item in self.communicator.gpu.world.heads() if isinstance(item, Operation)]
        parts = {o.communicator.rank: o for o in heads if o.meets(self) and o.work and o.number == self.number}
        if len(parts) < self.communicator.meeting.size:
            return False
        if self.work is not None:
            self.work([parts[rank] for rank in sorted(parts)])
        for part in parts.values():
            part.done = True
        return True

    def run_messages(self) -> bool:
        world, rank = self.communicator.gpu.world, self.communicator.rank
        groups = [o for o in world.heads() if isinstance(o, Operation) and o.work is None and o.meets(self)]
        moved = False
        for group in groups:
            peer = group.communicator.rank
            mine, theirs = [b for b in self.to if b.peer == peer], [b for b in group.of if b.peer == rank]
            for source, target in zip(mine, theirs, strict=False):
                if (source.dtype, source.data.numel()) != (target.dtype, target.data.numel()):
                    world.fail(
                        f"rank {rank} sends {source.data.numel()} of dtype {source.dtype} to rank {peer}, which "
                        f"receives {target.data.numel()} of dtype {target.dtype}"
                    )
                target.data.copy_(source.data)
                self.to = [b for b in self.to if b is not source]
                group.of = [b for b in group.of if b is not target]
                moved = True
        self.done = not self.to and not self.of
        if moved and not self.done:
            # Whom this has served may be finished although it was looked at before.
            world.again = True
        return self.done

    def meets(self, other: Operation) -> bool:
        return self.communicator.meeting is other.communicator.meeting

    def waits_for(self, other: Operation) -> bool:
        """Returns whether it cannot run before another, which is under way elsewhere, has finished."""
        if not self.meets(other):
            return False
        if self.work is None:
            return other.communicator.rank in {buffer.peer for buffer in (*self.to, *self.of)}
        return other.number != self.number


class NcclCommunicator:
    """One rank of a communicator; its methods have the arguments of CuPy's, by the same names."""

    def __init__(self, gpu: Gpu, size: int, unique_id: bytes, rank: int) -> None:
        if len(unique_id) != 128:
            raise ValueError(f"commId length {len(unique_id)} != 128")
        self.gpu = gpu
        self.world = gpu.world
        self.rank = rank
        self.state = "alive"
        self.count = 0
        with self.world.changed:
            self.meeting = self.world.meetings.setdefault(unique_id, Meeting(size))
            if self.meeting.size != size or rank in self.meeting.members:
                self.world.fail(f"rank {rank} of {size} joins a communicator of {self.meeting}")
            self.meeting.members[rank] = self
            gpu.communicators.append(self)
            self.world.changed.notify_all()
            came = lambda: len(self.meeting.members) == size  # noqa: E731
            self.world.block(lambda: came() or self.world.is_over, "the other ranks of a communicator")
            if not came():
                raise FakeNcclError("ranks did not come")

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        work = lambda parts: _scatter(parts, [_reduce(parts, op)] * len(parts))  # noqa: E731
        self._collective("allReduce", (count, datatype, op), work, sendbuf, count, recvbuf, count, datatype, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        work = lambda parts: _scatter([parts[root]], [_reduce(parts, op)])  # noqa: E731
        room = count if self.rank == root else 0
        self._collective("reduce", (count, datatype, op, root), work, sendbuf, count, recvbuf, room, datatype, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        n = self.meeting.size
        work = lambda parts: _scatter(parts, _reduce(parts, op).chunk(n))  # noqa: E731
        self._collective(
            "reduceScatter",
            (recvcount, datatype, op),
            work,
            sendbuf,
            n * recvcount,
            recvbuf,
            recvcount,
            datatype,
            stream,
        )

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        work = lambda parts: _scatter(parts, [parts[root].input.data.clone()] * len(parts))  # noqa: E731
        self._collective("broadcast", (count, datatype, root), work, sendbuff, count, recvbuff, count, datatype, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        n = self.meeting.size
        work = lambda parts: _scatter(parts, [torch.cat([p.input.data for p in parts])] * n)  # noqa: E731
        self._collective("allGather", (count, datatype), work, sendbuf, count, recvbuf, n * count, datatype, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message("recv", recvbuf, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        self._usable("check_async_error")
        if status := self.gpu.async_error:
            raise FakeNcclError(f"NCCL_ERROR number {status}") if status < NAMELESS else KeyError(status)

    def abort(self) -> None:
        with self.world.changed:
            self._usable("abort")
            self.state = "aborted"
            for stream in self.gpu.streams.values():
                stream.queue = deque(item for item in stream.queue if getattr(item, "communicator", None) is not self)
            self.world.progress()

    def destroy(self) -> None:
        with self.world.changed:
            self._usable("destroy")
            queued = [item for stream in self.gpu.streams.values() for item in stream.queue]
            if any(getattr(item, "communicator", None) is self for item in queued):
                self.world.fail("destroy while operations are under way")
            self.state = "destroyed"

    def _usable(self, what: str) -> None:
        if self.state != "alive":
            self.world.fail(f"{what} on a communicator that has been {self.state}")

    def _collective(
        self,
        name: str,
        arguments: tuple[int, ...],
        work: Callable[[list[Any]], None],
        source: int,
        size: int,
        target: int,
        room: int,
        dtype: int,
        handle: int,
    ) -> None:
        self._usable(name)
        self.gpu.enter(name)
        with self.world.changed:
            number, self.count, calls = self.count, self.count + 1, self.meeting.calls
            if len(calls) == number:
                calls.append((self.rank, (name, *arguments)))
            rank, call = calls[number]
            if call != (name, *arguments):
                text = f"rank {self.rank} calls {(name, *arguments)} as collective {number}, rank {rank} called {call}"
                self.world.fail(text)
            stream = self._stream(handle)
            output = self._buffer(target, room, dtype, self.rank, stream) if room else None
            mine = self._buffer(source, size, dtype, self.rank, stream)
            stream.put(Operation(name, self, number, work, mine, output).reset())

    def _message(self, name: str, pointer: int, count: int, dtype: int, peer: int, handle: int) -> None:
        self._usable(name)
        self.world.raise_failure()
        with self.world.changed:
            stream, group = self._stream(handle), self.gpu.group
            buffer = self._buffer(pointer, count, dtype, peer, stream)
            whole = Operation(name if group is None else "group", self)
            operation = whole if group is None else group.setdefault((self, stream), whole)
            (operation.sends if name == "send" else operation.recvs).append(buffer)
            if group is None:
                stream.put(operation.reset())

    def _stream(self, handle: int) -> Stream:
        if handle not in self.gpu.streams or self.gpu.streams[handle].own:
            self.world.fail(f"{handle=} is not a stream that was made on this rank")
        return self.gpu.streams[handle]

    def _buffer(self, pointer: int, count: int, dtype: int, peer: int, stream: Stream) -> Buffer:
        if dtype not in _DTYPES or not 0 <= peer < self.meeting.size or count < 1:
            self.world.fail(f"bad arguments: {dtype=}, {peer=}, {count=}")
        nbytes = count * _DTYPES[dtype].itemsize
        ends = [(t.data_ptr(), t.data_ptr() + t.nbytes, t) for t in stream.recorded]
        owner = next((t for start, end, t in ends if start <= pointer and pointer + nbytes <= end), None)
        if owner is None and not stream.capturing:
            self.world.fail(f"{nbytes} bytes at {pointer:#x} belong to no tensor that was recorded on the stream")
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        return Buffer(peer, dtype, torch.frombuffer(memory, dtype=_DTYPES[dtype]), owner)


def _reduce(parts: list[Any], op: int) -> torch.Tensor:
    total: torch.Tensor = parts[0].input.data.clone()
    for part in parts[1:]:
        _COMBINE[op](total, part.input.data, out=total)
    return total


def _scatter(parts: list[Any], results: Any) -> None:
    for part, result in zip(parts, results, strict=True):
        part.output.data.copy_(result)


def run_ranks(
    size: int,
    fn: Callable[[Communicator], Any],
    *,
    timeout: float = 20.0,
    world: World | None = None,
    signs: bool = False,
) -> list[Any]:
    """Runs a function on communicators of thread ranks, and closes those that are not ended."""
    world, store, signs_store = world or World(size), dist.HashStore(), Records(size)
    clock = HeartbeatClock(size)

    def run(rank: int) -> Any:
        liveness = clock.join(signs_store, rank) if signs else None
        try:
            given = {"timeout": timeout, "liveness": liveness, "runtime": world.runtime(rank)}
            made = Communicator.over(store, rank, size, key="test", device=torch.device("cpu"), **given)
            try:
                result = fn(made)
                made.close()
                made.close_relatives()
            except BaseException:
                with contextlib.suppress(MisuseError):
                    made.abort()
                    made.close_relatives()
                raise
            return result
        finally:
            if liveness is not None:
                liveness.stop("the test is over")

    results = world.run(run)
    assert threads_left() == []
    return results


def threads_left() -> list[str]:
    deadline = time.monotonic() + LIMIT
    name = "bagua_kernels nccl"
    while (left := [t.name for t in threading.enumerate() if t.name.startswith(name)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
