"""The communicator over NCCL, on a stand-in that moves real data and checks how it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bagua_kernels.comm import Communicator
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl import communicator as nccl
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    CommunicationError,
)
from tests import limits
from tests.comm.backends.nccl.fake_cuda import MisuseError
from tests.comm.backends.nccl.fake_nccl import World, run_ranks
from tests.comm.contract import CASES
from tests.comm.trouble import late_neighbour
from tests.grids import grid

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("short_breaks")


@grid(case=CASES, size=[1, 2, 3, 4], cover=1)
def test_contract(case: Callable[[Communicator], None], size: int) -> None:
    run_ranks(size, case)


@grid(cover=1, size=[2, 3])
def test_late_neighbour(size: int) -> None:
    run_ranks(size, late_neighbour)


def test_operations_run_on_a_stream_of_high_priority_between_events() -> None:
    world = World(2)
    logs: list[list[str]] = []

    def fn(c: NcclCommunicator) -> None:
        stream = c._queue.endpoint.stream
        work = c.all_reduce(torch.ones(3))
        logs.append(list(stream.log))
        before = len(world.gpus[c.rank].current_stream().log)
        work.wait()
        logs.append(world.gpus[c.rank].current_stream().log[before:])
        c.all_to_all(torch.empty(4), torch.ones(4)).wait()
        logs.append(stream.log[3:])

    run_ranks(2, fn, world=world)
    assert logs.count(["wait", "allReduce", "record"]) == 2
    assert logs.count(["wait"]) == 2
    assert logs.count(["wait", "group", "record"]) == 2
    assert [gpu.priorities for gpu in world.gpus] == [[-1], [-1]]


def test_starting_and_waiting_do_not_wait_for_the_other_ranks() -> None:
    started = threading.Event()

    def fn(c: NcclCommunicator) -> None:
        x = torch.ones(3)
        if c.rank == 1:
            assert started.wait(limits.seconds(10))
        work = c.all_reduce(x)
        if c.rank == 0:
            assert not work.is_completed()
            started.set()
        work.wait()
        assert work.is_completed()
        assert x.tolist() == [2.0] * 3

    run_ranks(2, fn)


def test_inputs_are_not_copied() -> None:
    def fn(c: NcclCommunicator) -> None:
        x = torch.ones(5)
        pointers: list[int] = []
        native = c._queue.endpoint._handle
        original = native.allReduce
        native.allReduce = lambda *args: (pointers.extend(args[:2]), original(*args))
        c.all_reduce(x).wait()
        assert pointers == [x.data_ptr(), x.data_ptr()]

    run_ranks(2, fn)


def test_sends_and_receives_of_a_tag_are_one_group() -> None:
    def fn(c: NcclCommunicator) -> None:
        log, peer = c._queue.endpoint.stream.log, 1 - c.rank
        outputs = [torch.empty(4) for _ in range(2)]
        works = [c.send(torch.full((4,), float(c.rank + i)), peer, tag=7) for i in (0, 10)]
        works += [c.recv(output, peer, tag=7) for output in outputs]
        assert log == []
        # Another operation issues them first, as they were called before it.
        c.barrier().wait()
        assert log.count("group") == 1
        assert log.index("group") < log.index("allReduce")
        for work in works:
            work.wait()
        assert [output[0].item() for output in outputs] == [peer, peer + 10]

    run_ranks(2, fn)


def test_messages_of_one_group_are_received_in_order_by_several() -> None:
    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            works = [c.send(torch.full((4,), float(i)), 1) for i in range(3)]
            for work in works:
                work.wait()
        else:
            for i in range(3):
                got = torch.empty(4)
                c.recv(got, 0).wait()
                assert got[0].item() == i

    run_ranks(2, fn)


def test_a_capture_is_neither_queried_nor_watched_and_replays() -> None:
    world = World(3)

    def fn(c: NcclCommunicator) -> None:
        gpu = world.gpus[c.rank]
        c.barrier().wait()
        x, y, z = torch.ones(4), torch.empty(6), torch.full((6,), float(c.rank))
        left, right = (c.rank - 1) % 3, (c.rank + 1) % 3
        got = torch.empty(4)
        with gpu.capture() as graph:
            work = c.all_reduce(x)
            assert work.is_completed()
            work.wait()
            c.all_to_all(y, z).wait()
            c.neighbour_exchange({left: got}, {right: x}).wait()
            works = [c.send(x, right), c.recv(got, left)]
            for each in works:
                each.wait()
            assert not any(ticket.captured for ticket in c._queue.watchdog._tickets)
        assert x.tolist() == [1.0] * 4
        for i in (1, 2):
            gpu.replay(graph)
            assert x.tolist() == [3.0**i] * 4
            assert got.tolist() == [3.0**i] * 4
            assert y.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        events = [item.event for _, item in graph if hasattr(item, "event")]
        assert sum(event.queries for event in events) == 0

    run_ranks(3, fn, world=world)


def test_a_rank_that_does_not_come_is_named() -> None:
    world, store = World(3), dist.HashStore()

    def fn(rank: int) -> None:
        if rank != 1:
            with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of 3 did not come") as caught:
                NcclCommunicator.over(store, rank, 3, key="k", device=CPU, timeout=1.0, runtime=world.runtime(rank))
            assert caught.value.ranks == (1,)

    world.run(fn)


def test_it_is_made_from_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        NcclCommunicator()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(nccl_binding, "unavailable", lambda: "there is none")
        with pytest.raises(BackendUnavailableError, match="rank 0: there is none"):
            NcclCommunicator()
        with pytest.raises(ValueError, match="TorchCommunicator on a CPU"):
            NcclCommunicator(device=CPU)
        monkeypatch.setattr(nccl_binding, "unavailable", lambda: "")
        monkeypatch.setattr(nccl_binding, "load", lambda: World(1).runtime(0))
        c = NcclCommunicator(timeout=5, device=torch.device("cuda", 3))
        assert (c.rank, c.size, c.device, c.timeout) == (0, 1, torch.device("cuda", 3), 5.0)
        nccl._close_all()
        with pytest.raises(CommunicationError, match="closed"):
            c.barrier()
    finally:
        dist.destroy_process_group()


def test_wrong_order_of_a_user_is_found_through_the_communicator() -> None:
    def fn(c: NcclCommunicator) -> None:
        (c.all_reduce(torch.ones(2)) if c.rank else c.broadcast(torch.ones(2))).wait()

    with pytest.raises(MisuseError, match="as collective 0"):
        run_ranks(2, fn)
