"""What NCCL's communicator does when a peer is lost, something is forgotten or the process ends, on a stand-in."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl import communicator as nccl
from bagua_kernels.comm.backends.nccl import watchdog as nccl_watchdog
from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.nccl.work import Ticket
from bagua_kernels.comm.failures import liveness_store
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests.comm.backends.nccl.fake_nccl import World, run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watchdog, "_PERIOD", 0.005)
    monkeypatch.setattr(nccl_watchdog, "_PATIENT", 0.1)


def await_end(c: NcclCommunicator, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not c.session.ended:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def nameless(*arguments: Any) -> Any:
    """What CuPy does instead of raising for ncclRemoteError."""
    raise KeyError(6)


@pytest.mark.parametrize("connect", [nameless, lambda size, name, rank: nameless() if type(name) is tuple else int([])])
def test_a_status_without_a_name_while_connecting_is_an_error(connect: Callable[..., Any]) -> None:
    module = SimpleNamespace(NcclCommunicator=connect)
    runtime = Runtime(module, None, lambda tensor, stream: None, lambda: None, lambda device: None)
    with pytest.raises(RuntimeError, match="NCCL returned status 6"):
        runtime.connect(2, bytes(128), 0)


@pytest.mark.parametrize("method", ["check", "abort", "destroy"])
def test_a_status_without_a_name_is_an_error_of_each_call(method: str) -> None:
    runtime = World(1).runtime(0)
    native = SimpleNamespace(check_async_error=nameless, abort=nameless, destroy=nameless)
    endpoint = Endpoint(runtime, native, runtime.open_stream(CPU))
    with pytest.raises(RuntimeError, match="NCCL returned status 6"):
        getattr(endpoint, method)()


def test_whatever_the_check_raises_ends_the_session() -> None:
    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            c._queue.watchdog._check = lambda: {}["it is broken"]
            c.all_reduce(torch.ones(1)).wait()
            await_end(c)
            with pytest.raises(CommunicationError, match=r"all_reduce #0 .*it is broken"):
                c.barrier()
        c.abort()

    run_ranks(2, fn)


def test_a_forgotten_split_stays_until_it_has_ended() -> None:
    def fn(c: NcclCommunicator) -> None:
        child = c.duplicate()
        child.barrier().wait()
        forgotten, number = weakref.ref(child), child._order
        del child
        gc.collect()
        assert forgotten() is nccl._made[number]
        c.barrier().wait()
        nccl._made[number].close()
        assert number not in nccl._made

    before = dict(nccl._made)
    run_ranks(2, fn)
    assert nccl._made == before


def test_relatives_are_closed_without_the_others() -> None:
    world = World(2)
    closed = threading.Event()

    def fn(c: NcclCommunicator) -> None:
        child = c.duplicate()
        grandchild, stranger = (
            child.duplicate(),
            NcclCommunicator.over(c._store, c.rank, 2, key="stranger", device=CPU, runtime=world.runtime(c.rank)),
        )
        c.barrier().wait()
        if c.rank == 0:
            grandchild.close_relatives()
            for each in (c, child, grandchild):
                assert each.is_ended()
                assert each._order not in nccl._made
            closed.set()
        assert closed.wait(10)
        assert not stranger.is_ended()
        assert stranger.all_gather_object(c.is_ended()) == [True, False]
        stranger.close()
        c.close_relatives()

    run_ranks(2, fn, world=world)


def test_the_goodbye_at_exit_has_one_limit_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LONGEST_GOODBYE", 0.5)
    exited = threading.Event()

    def fn(c: NcclCommunicator) -> None:
        mine = [c, *(c.duplicate() for _ in range(4))]
        c.barrier().wait()
        if c.rank == 0:
            monkeypatch.setattr(nccl, "_made", {each._order: each for each in mine})
            started = time.monotonic()
            nccl._close_all()
            took = time.monotonic() - started
            monkeypatch.undo()
            exited.set()
            assert 0.3 < took < 1.5
        else:
            assert exited.wait(10)
        for each in mine:
            each.abort()
            nccl._made.pop(each._order, None)

    run_ranks(2, fn)


def test_the_allocator_learns_of_the_stream_that_reads_a_temporary() -> None:
    world = World(2)

    def fn(c: NcclCommunicator) -> None:
        gpu = world.gpus[c.rank]
        x = torch.ones(4, dtype=torch.int16)  # NCCL has no reduction of it: what is gathered is reduced in `wait`
        work = c.all_reduce(x, ReduceOp.SUM)
        kept = list(work.tensors)
        assert len(kept) == 2
        finish, at = work.finish, []
        work.finish = lambda: (finish(), at.append(len(gpu.records)))
        work.wait()
        # After the last use.
        recorded = [tensor for tensor, stream in gpu.records[at[0] :] if stream is gpu.current_stream()]
        assert [tensor.data_ptr() for tensor in recorded] == [tensor.data_ptr() for tensor in kept]
        assert work.tensors == []
        assert x.tolist() == [2] * 4
        before = len(gpu.records)
        with gpu.capture():
            c.barrier().wait()
        assert len(gpu.records) == before

    run_ranks(2, fn, world=world)


def test_the_watch_leaves_time_for_the_verdict() -> None:
    def fn(c: NcclCommunicator) -> None:
        c.barrier().wait()
        if c.rank == 0:
            c.session.patience = lambda: 0.1
            started = time.monotonic()
            c.all_reduce(torch.ones(1)).wait()
            await_end(c)
            assert time.monotonic() - started < c.timeout / 4
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 "):
                c.barrier()
        c.abort()

    run_ranks(2, fn)


def test_the_peers_of_an_exchange_are_named() -> None:
    assert Ticket("all_reduce", 3).told() == ("all_reduce", 3, None)
    assert Ticket("send", None, (2,)).told() == ("send", None, 2)
    over = threading.Barrier(4, timeout=20)

    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            peers = (1, 3)
            outputs, inputs = ({peer: torch.ones(2) for peer in peers} for _ in range(2))
            c.neighbour_exchange(outputs, inputs).wait()
            await_end(c)
            with pytest.raises(CommunicationError, match="neighbour_exchange with ranks 1, 3 of communicator"):
                c.barrier()
        over.wait()
        c.abort()

    run_ranks(4, fn, timeout=0.3)


def test_every_communicator_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Stream:
        def __init__(self, **options: Any) -> None:
            assert options == {"non_blocking": True, "priority": -1}
            self.ptr = 1000 + len(made)
            made.append(weakref.ref(self))

    cuda = SimpleNamespace(Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(nccl_binding, "_streams", [])
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: pointer)
    assert [nccl_binding._open_stream(CPU) for _ in range(40)] == list(range(1000, 1040))
    gc.collect()
    assert all(stream() is not None for stream in made)


def test_all_ranks_beat_as_the_first_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_KERNELS_HEARTBEAT", "0.05")
    offered: list[Any] = [None, None]
    rounds = 0

    def turn() -> None:
        nonlocal rounds
        rounds += 1
        # As if the other rank's environment said something else.
        monkeypatch.setenv("BAGUA_KERNELS_HEARTBEAT", "0.02")

    meeting = threading.Barrier(2, action=turn, timeout=20)
    made: list[Any] = [None, None]
    secret = Secret.random()

    def run(rank: int) -> None:
        def exchange(obj: Any) -> list[Any]:
            offered[rank] = obj
            meeting.wait()
            found = list(offered)
            meeting.wait()
            return found

        made[rank] = liveness_store.connect(rank, 2, exchange, secret)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        assert [one.heartbeat for one in made] == [0.05, 0.05]
    finally:
        for one in reversed(made):
            one.stop("the test is over")
