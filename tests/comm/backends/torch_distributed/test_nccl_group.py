"""NCCL as torch drives it, on a stand-in: how a group connects its ranks, and in which order it lets go of them."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_kernels.comm.backends import selection
from bagua_kernels.comm.backends.torch_distributed import group as torch_group
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.backends.torch_distributed.group import TorchGroup
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits

GPU = torch.device("cuda", 1)
LIMIT = limits.seconds(20)


class Gpu:
    """What happened on one rank, in order, and a stream that has work until the host has looked a few times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.looks = 3
        self.devices: list[torch.device | None] = []
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **options: zeros(*shape, **options))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)

    def current_stream(self, device: torch.device | None = None) -> Any:
        self.devices.append(device)
        return types.SimpleNamespace(wait_stream=lambda other: self.log.append("stream waits for stream"))


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: Any) -> None:
        self.gpu.log.append("event")

    def query(self) -> bool:
        self.gpu.looks -= 1
        if self.gpu.looks == 0:
            self.gpu.log.append("host has waited")
        return self.gpu.looks <= 0


class Backend:
    """Records what is asked of torch's backend."""

    def __init__(self, gpu: Gpu, shutdown: Callable[[], None] = lambda: None) -> None:
        self.log = gpu.log
        self._shutdown = shutdown

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.log.append("barrier")
        return types.SimpleNamespace(wait=lambda: self.log.append("stream waits"), is_completed=lambda: True)

    def shutdown(self) -> None:
        self.log.append("shutdown")
        self._shutdown()

    def abort(self) -> None:
        self.log.append("abort")

    def __del__(self) -> None:
        self.log.append("dropped")


def communicator(backend: Any, size: int = 2, timeout: float = LIMIT) -> TorchCommunicator:
    made = TorchCommunicator.__new__(TorchCommunicator)
    group = TorchGroup(backend, "nccl", dist.HashStore(), 0, size, timeout, GPU, "")
    made._assemble(group, Session("world", timeout, 0, tuple(range(size)), None), "key", Secret.random())
    return made


ORDER = ["barrier", "stream waits", "event", "host has waited", "shutdown", "dropped"]


def test_close_waits_on_the_host_before_it_drops_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of torch's backend aborts kernels that run, if nothing has shut it down."""
    gpu = Gpu(monkeypatch)
    made = communicator(Backend(gpu))
    made.close()
    assert gpu.log == ORDER
    assert gpu.devices == [GPU]
    made.close()
    assert gpu.log == ORDER


def test_base_of_cupys_communicator_is_closed_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    base, made = communicator(Backend(gpu)), object()
    base.introduction = SimpleNamespace(first=list)  # type: ignore[assignment]
    monkeypatch.setattr(selection, "TorchCommunicator", lambda **options: base)
    monkeypatch.setattr(selection, "agreed_settings", lambda everyone: selection.Settings(0, "", "cupy"))
    monkeypatch.setattr(selection, "NcclCommunicator", lambda **options: made)
    assert selection.over_torch(LIMIT, GPU, "") is made
    assert gpu.log == ORDER


def test_relatives_shut_down_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    made = communicator(Backend(gpu))
    made.session.liveness = object.__new__(type("Liveness", (), {"closed": lambda self, name: None}))
    made.close_relatives()
    assert gpu.log == ["shutdown", "dropped"]


def test_a_stream_that_never_ends_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.looks = 1 << 60
    made = communicator(Backend(gpu))
    with pytest.raises(CollectiveTimeoutError, match="close of communicator 'world'"):
        made.close(0.05)
    assert gpu.log == ["barrier", "stream waits", "event", "abort"]


def test_shutdown_that_does_not_return_or_raises_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, release = Gpu(monkeypatch), threading.Event()
    monkeypatch.setattr(torch_group, "_PATIENCE", 0.05)

    def fail() -> None:
        raise RuntimeError("no")

    with caplog.at_level(logging.WARNING):
        communicator(Backend(gpu, lambda: release.wait(LIMIT) and None)).close()
        communicator(Backend(gpu, fail)).close()
    release.set()
    assert [record.getMessage() for record in caplog.records] == [
        "NCCL did not shut down: operations are still under way after 0.05 s",
        "NCCL did not shut down: no",
    ]


@pytest.mark.parametrize("end", [TorchGroup.close, TorchGroup.abandon])
def test_group_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch, end: Callable[[TorchGroup], None]) -> None:
    """A single rank has no backend of its own."""
    gpu = Gpu(monkeypatch)
    backend = Backend(gpu)
    end(TorchGroup(backend, "nccl", dist.HashStore(), 0, 1, LIMIT, GPU, ""))
    assert gpu.log == []


def test_works_follow_streams_of_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    handle = types.SimpleNamespace(wait=lambda: gpu.log.append("stream waits"))
    session = Session("world", LIMIT, 0, (0, 1), None)
    work = SessionWork(session, handle, "all_reduce", 0, None, lambda: gpu.log.append("finish"), GPU)
    work.wait()
    work.wait()
    assert gpu.log == ["stream waits", "finish", "stream waits for stream"]
    assert set(gpu.devices) == {GPU}


class Lazy:
    """Connects as `ProcessGroupNCCL` does: all ranks at the first operation of any.

    After `eager_connect_single_device` torch would put all sends and receives on one stream.
    """

    class Options:
        _timeout: Any = None

    meeting: threading.Barrier
    connected: bool
    eager: bool

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank = rank
        self.connected = self.eager = False

    def _connect(self) -> None:
        if not self.connected:
            self.meeting.wait(LIMIT)
            self.connected = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect()
        self.eager = True

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._connect()
        return types.SimpleNamespace(wait=lambda: None)

    def _start_coalescing(self) -> None:
        self._connect()

    def _end_coalescing(self) -> Any:
        return types.SimpleNamespace(wait=lambda: None)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._connect()

    recv = send


def over_lazy(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Lazy, raising=False)
    monkeypatch.setattr(Lazy, "meeting", threading.Barrier(size), raising=False)


def test_first_exchange_among_two_ranks_does_not_wait_for_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    over_lazy(monkeypatch, 3)
    store, exchanged, seen = dist.HashStore(), threading.Event(), {}

    def run(rank: int) -> None:
        backend = torch_group._open("nccl", store, "key", rank, 3, LIMIT, GPU, "")
        group = TorchGroup(backend, "nccl", store, rank, 3, LIMIT, GPU, "")
        if rank < 2:
            data = torch.zeros(2)
            group.exchange({1 - rank: data}, {1 - rank: data}, 0)
            seen[rank] = backend.eager
            if len(seen) == 2:
                exchanged.set()
        else:
            seen["third"] = exchanged.wait(LIMIT)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert seen == {0: False, 1: False, "third": True}


def test_rank_that_does_not_open_its_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for it for ever."""
    over_lazy(monkeypatch, 2)
    parent = TorchGroup(None, "nccl", dist.HashStore(), 0, 3, 0.05, GPU, "")
    with pytest.raises(CommunicationError, match=r"ranks \[1\] of 2 did not come within 0.05 s"):
        parent.child("key", (0, 2)).open(threading.Event())
