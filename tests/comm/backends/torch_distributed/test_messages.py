"""Messages between neighbours: what waits for them, what groups them, and what is left of them at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from bagua_kernels import comm
from bagua_kernels.comm.backends.torch_distributed import gloo_message
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.backends.torch_distributed.gloo_message import GlooMessages
from bagua_kernels.comm.backends.torch_distributed.group import TorchGroup
from bagua_kernels.comm.failures import session_work
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.testing import Processes
from bagua_kernels.comm.work import Pending, Together
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits
from tests.clocks import VirtualClock


class Divided(Pending):
    """A communication that divides its output by two, and what happens meanwhile."""

    def __init__(
        self, complete: Callable[[], None] = lambda: None, conclude: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.output = 8.0
        self.complete = complete
        self.conclude = conclude

    def is_completed(self) -> bool:
        return True

    def _complete(self) -> None:
        self.complete()

    def _conclude(self) -> None:
        self.output /= 2
        self.conclude()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_wait_can_be_repeated() -> None:
    """Ctrl-C before the outputs are written leaves them to the next wait."""
    work = Divided(complete=interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    work.complete = lambda: None
    for _ in range(2):
        work.wait()
    assert work.output == 4.0


def test_interrupted_outputs_are_not_written_again() -> None:
    """What may have been divided already is an error from then on, not divided again."""
    work = Divided(conclude=interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    for _ in range(2):
        with pytest.raises(CommunicationError, match="KeyboardInterrupt"):
            work.wait()
    assert work.output == 4.0


def test_waiting_threads_take_over_from_one_that_was_interrupted() -> None:
    """The others do not go on without the outputs."""
    inside, leave = threading.Event(), threading.Event()
    calls = []

    def complete() -> None:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            inside.set()
            assert leave.wait(limits.seconds(10))
            interrupt()

    work, seen = Divided(complete=complete), []

    def wait() -> None:
        try:
            work.wait()
            seen.append(work.output)
        except KeyboardInterrupt:
            seen.append(None)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    threads[0].start()
    assert inside.wait(limits.seconds(10))
    for thread in threads[1:]:
        thread.start()
    leave.set()
    for thread in threads:
        thread.join(limits.seconds(10))
    assert sorted(seen, key=str) == [4.0, 4.0, 4.0, None]


class TimedHandle:
    """A message that ends at a time of a clock, which runs only while it is waited for."""

    def __init__(self, clock: VirtualClock, end: float) -> None:
        self.clock = clock
        self.end = end

    def is_completed(self) -> bool:
        return self.clock.now >= self.end

    def wait(self, limit: timedelta) -> None:
        self.clock.sleep(max(0.0, min(limit.total_seconds(), self.end - self.clock.now)))
        if not self.is_completed():
            raise RuntimeError("still under way")


def test_works_that_count_as_one_have_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link on which each message takes most of the timeout does not multiply it."""
    clock = VirtualClock()
    monkeypatch.setattr(session_work, "time", clock)
    session = Session("world", 2.0, 0, (0, 1, 2), None)
    works = [
        SessionWork(session, TimedHandle(clock, end), "recv", None, peer, None, None)
        for peer, end in ((1, 1.25), (2, math.inf))
    ]
    for work in works:
        monkeypatch.setattr(work, "_now", clock.monotonic)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2 .* did not finish within 2 s") as caught:
        Together(works).wait()
    assert caught.value.ranks == (2,)
    assert clock.now == pytest.approx(2.0)


class Wires:
    """What torch's NCCL makes of messages: a queue for each pair of ranks, and one for what is grouped.

    Of each queue only the first entry moves; a send moves when its receive is in the first entry of a queue of the peer.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.queues: list[dict[Any, list[Item]]] = [defaultdict(list) for _ in range(size)]

    def put(self, rank: int, key: Any, item: Item) -> None:
        with self.changed:
            self.queues[rank][key].append(item)
            while self._move():
                pass
            self.changed.notify_all()

    def _move(self) -> bool:
        for rank, queues in enumerate(self.queues):
            for item in [queue[0] for queue in queues.values() if queue]:
                for number, (kind, peer, tensor) in enumerate(item.messages):
                    if kind == "send" and self._deliver(rank, peer, tensor):
                        del item.messages[number]
                        self._clear()
                        return True
        return False

    def _deliver(self, rank: int, peer: int, tensor: torch.Tensor) -> bool:
        for queue in self.queues[peer].values():
            messages = queue[0].messages if queue else []
            for number, (kind, of, into) in enumerate(messages):
                if (kind, of) == ("recv", rank):
                    into.copy_(tensor)
                    del messages[number]
                    return True
        return False

    def _clear(self) -> None:
        for queues in self.queues:
            for queue in queues.values():
                while queue and not queue[0].messages:
                    queue.pop(0)


class Item:
    """One entry of a queue; it has the methods of torch's work."""

    def __init__(self, wires: Wires, messages: list[tuple[str, int, torch.Tensor]]) -> None:
        self.wires = wires
        self.messages = messages

    def is_completed(self) -> bool:
        return not self.messages

    def wait(self, limit: timedelta) -> None:
        with self.wires.changed:
            if not self.wires.changed.wait_for(self.is_completed, limit.total_seconds()):
                raise RuntimeError("still under way")


class Nccl:
    """A stand-in for torch's backend."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires = wires
        self.rank = rank
        self.group: list[Any] | None = None

    def _start_coalescing(self) -> None:
        self.group = []

    def _end_coalescing(self) -> Item:
        assert self.group is not None
        item, self.group = Item(self.wires, self.group), None
        self.wires.put(self.rank, "all", item)
        return item

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Item | None:
        return self._put("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Item | None:
        return self._put("recv", tensors[0], peer)

    def abort(self) -> None:
        pass

    def _put(self, kind: str, tensor: torch.Tensor, peer: int) -> Item | None:
        if self.group is not None:
            self.group.append((kind, peer, tensor))
            return None
        item = Item(self.wires, [(kind, peer, tensor)])
        self.wires.put(self.rank, frozenset((self.rank, peer)), item)
        return item


@pytest.mark.parametrize("size", [2, 3])
def test_neighbour_exchange_on_nccl_does_not_wait_for_itself(size: int) -> None:
    """All ranks receive and send at once, which messages one behind the other on a stream cannot."""
    wires, seen = Wires(size), {}

    def run(rank: int) -> None:
        c = TorchCommunicator.__new__(TorchCommunicator)
        cpu = torch.device("cpu")
        group = TorchGroup(Nccl(wires, rank), "nccl", HashStore(), rank, size, 3.0, cpu, "")
        c._assemble(group, Session("world", 3.0, rank, tuple(range(size)), None), "key", Secret.random())
        peers = [peer for peer in range(size) if peer != rank]
        for n in range(2):
            got = {peer: torch.zeros(2) for peer in peers}
            c.neighbour_exchange(got, {peer: torch.full((2,), 10.0 * n + rank) for peer in peers}).wait()
            seen[rank, n] = {peer: tensor.tolist() for peer, tensor in got.items()}
        c.session.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.seconds(10))
    for n in range(2):
        for rank in range(size):
            assert seen[rank, n] == {peer: [10.0 * n + peer] * 2 for peer in range(size) if peer != rank}


class Handle:
    """A message that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, limit: timedelta) -> None:
        if not self.ended.wait(limit.total_seconds()):
            raise RuntimeError("still under way")
        if self.error is not None:
            raise self.error


def test_message_is_waited_for_in_slices_and_completes_by_itself() -> None:
    """Running out of a slice does not reach Gloo, and who only looks sees the end of it."""
    handle, messages = Handle(), GlooMessages(None, [1])
    message = messages.start(handle, torch.zeros(1), 1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="under way"):
            message.wait(timedelta(milliseconds=1))
        assert not message.is_completed()
    assert messages._under_way == {message}
    handle.ended.set()
    limits.until(message.is_completed, "the message completes", limit=10)
    for _ in range(2):
        message.wait(timedelta(seconds=limits.seconds(10)))
    assert not messages._under_way


def test_message_that_fails_does_so_again_and_again() -> None:
    handle = Handle()
    message = GlooMessages(None, [1]).start(handle, torch.zeros(1), 1)
    handle.error = RuntimeError("broken")
    handle.ended.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            message.wait(timedelta(seconds=limits.seconds(10)))


def test_threads_of_messages_are_used_again_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as messages at a time, and none when nothing is under way."""
    monkeypatch.setattr(gloo_message, "_IDLE", 0.2)

    def alive() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "bagua_kernels message"]

    for _ in range(3):
        handles = [Handle() for _ in range(5)]
        messages = [GlooMessages(None, [1]).start(handle, torch.zeros(1), 1) for handle in handles]
        assert len(alive()) >= 5
        for handle, message in zip(handles, messages, strict=True):
            handle.ended.set()
            message.wait(timedelta(seconds=limits.seconds(10)))
    limits.until(lambda: not alive(), "the threads end", limit=10)


def leaving() -> None:
    """One rank of two: both leave receives behind that nobody serves; rank 1 is killed."""
    c = comm.init(timeout=limits.seconds(20))
    pair = c.duplicate()
    works = [pair.recv(torch.ones(3), 1 - c.rank, tag) for tag in range(4)]
    c.barrier().wait()
    print("GOING", flush=True)
    if c.rank == 1:
        time.sleep(60)
    with pytest.raises(CommunicationError):
        works[0].wait()
    print("ENDED", flush=True)


def forgetting() -> None:
    """One rank of two: receives are under way when the process ends."""
    c = comm.init(timeout=limits.seconds(20))
    pair = c.duplicate()
    kept = [pair.recv(torch.ones(3), 1 - c.rank, tag) for tag in range(4)]
    c.barrier().wait()
    print("GOING", len(kept), flush=True)


@pytest.mark.slow
def test_process_ends_in_order_while_messages_are_under_way() -> None:
    """Threads that are in Gloo at the end of the interpreter would end the process with an abort."""
    with Processes(forgetting, 2, env={"BAGUA_KERNELS_SOCKETS": "0"}) as processes:
        for result in processes.wait(limits.seconds(60)):
            assert (result.returncode, result.stderr) == (0, "")


def test_killed_rank_ends_all_messages() -> None:
    with Processes(leaving, 2, env={"BAGUA_KERNELS_SOCKETS": "0"}) as processes:
        for rank in range(2):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        processes.send_signal(1, signal.SIGKILL)
        (result,) = processes.wait(limits.seconds(40), ranks=[0])
        assert (result.returncode, result.stdout) == (0, "GOING\nENDED\n"), result.stderr
