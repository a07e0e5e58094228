"""What NCCL's communicator does when a peer is lost, something is forgotten or the process ends, on a stand-in."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl import communicator as nccl
from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.nccl.work import Ticket
from bagua_kernels.comm.failures import liveness_store
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits
from tests.comm.backends.nccl.fake_cuda import LIMIT
from tests.comm.backends.nccl.fake_nccl import World, run_ranks
from tests.comm.backends.nccl.waiting import go_on

pytestmark = pytest.mark.usefixtures("short_breaks")

CPU = torch.device("cpu")


def nameless(*arguments: Any) -> Any:
    """What CuPy does instead of raising for ncclRemoteError."""
    raise KeyError(6)


def test_a_status_without_a_name_while_connecting_is_an_error() -> None:
    module = SimpleNamespace(NcclCommunicator=nameless)
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
            work = c.all_reduce(torch.ones(1))
            with pytest.raises(CommunicationError, match=r"all_reduce #0 .*it is broken"):
                go_on(c, work)
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
            NcclCommunicator.over(c._ids.store, c.rank, 2, key="stranger", device=CPU, runtime=world.runtime(c.rank)),
        )
        c.barrier().wait()
        if c.rank == 0:
            grandchild.close_relatives()
            for each in (c, child, grandchild):
                assert each.is_ended()
                assert each._order not in nccl._made
            closed.set()
        assert closed.wait(LIMIT)
        assert not stranger.is_ended()
        assert stranger.all_gather_object(c.is_ended()) == [True, False]
        stranger.close()
        c.close_relatives()

    run_ranks(2, fn, world=world)


class Leaver:
    """Takes the place of a communicator at exit: its `close` takes some seconds of a clock that only it moves.

    Attributes:
        calls: what was called, with the limits of `close`.
    """

    now = 0.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.session = SimpleNamespace(ended="", name="world")
        self.calls: list[float | str] = []

    def close(self, limit: float) -> None:
        self.calls.append(limit)
        Leaver.now += min(self.seconds, limit)
        if self.seconds > limit:
            raise CollectiveTimeoutError("nobody came", ())

    def abort(self, reason: str) -> None:
        self.calls.append(reason)


def test_the_goodbye_at_exit_has_one_limit_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaver, "now", 1000.0)
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: Leaver.now))
    monkeypatch.setattr(nccl, "_LONGEST_GOODBYE", 30.0)
    leavers = [Leaver(seconds) for seconds in (12.0, 10.0, 9.0, 0.0)]
    monkeypatch.setattr(nccl, "_made", dict(enumerate(leavers)))
    nccl._close_all()
    given_up = "its process exited"
    assert [each.calls for each in leavers] == [[30.0], [18.0], [8.0, given_up], [given_up]]
    assert Leaver.now == 1030.0


def test_the_goodbye_at_exit_ends_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(nccl, "_LONGEST_GOODBYE", 0.5)
    exited = threading.Event()

    def fn(c: NcclCommunicator) -> None:
        mine = [c, *(c.duplicate() for _ in range(4))]
        for each in mine:
            # No other limit can end the wait within this test.
            each.set_timeout(100 * LIMIT)
        c.barrier().wait()
        if c.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nccl, "_made", {each._order: each for each in mine})
                nccl._close_all()
            exited.set()
            assert "within 0.5 s" in c.session.ended
            assert {each.session.ended for each in mine[1:]} == {"its process exited"}
        else:
            assert exited.wait(LIMIT)
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
            # The timeout itself cannot be over within this test.
            c.set_timeout(100 * LIMIT)
            c.session.patience = lambda: 0.1
            work = c.all_reduce(torch.ones(1))
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 "):
                go_on(c, work)
        c.abort()

    run_ranks(2, fn)


def test_the_peers_of_an_exchange_are_named() -> None:
    assert Ticket("all_reduce", 3).told() == ("all_reduce", 3, None)
    assert Ticket("send", None, (2,)).told() == ("send", None, 2)
    over = threading.Barrier(4, timeout=LIMIT)

    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            peers = (1, 3)
            outputs, inputs = ({peer: torch.ones(2) for peer in peers} for _ in range(2))
            work = c.neighbour_exchange(outputs, inputs)
            c.set_timeout(0.3)
            with pytest.raises(CommunicationError, match="neighbour_exchange with ranks 1, 3 of communicator"):
                go_on(c, work)
        over.wait()
        c.abort()

    run_ranks(4, fn)


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

    meeting = threading.Barrier(2, action=turn, timeout=limits.seconds(100))
    made: list[Any] = [None, None]
    secret = Secret.random()

    def run(rank: int) -> None:
        def exchange(obj: Any) -> list[Any]:
            offered[rank] = obj
            meeting.wait()
            found = list(offered)
            meeting.wait()
            return found

        made[rank] = liveness_store.connect(rank, 2, exchange, secret, timeout=limits.seconds(100))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.seconds(100))
    try:
        assert [one.heartbeat for one in made] == [0.05, 0.05]
    finally:
        for one in reversed(made):
            one.stop("the test is over")
