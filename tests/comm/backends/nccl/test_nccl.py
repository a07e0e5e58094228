"""The communicator over NCCL, on a stand-in that moves real data and checks how it is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bagua_kernels.comm import Communicator
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl import communicator as nccl
from bagua_kernels.comm.backends.nccl import watchdog as nccl_watchdog
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    CommunicationError,
    RankLostError,
)
from tests.comm.backends.nccl.fake_cuda import MisuseError
from tests.comm.backends.nccl.fake_nccl import World, run_ranks
from tests.comm.contract import late_neighbour
from tests.comm.test_communicator import CASES
from tests.grids import grid

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watchdog, "_PERIOD", 0.005)
    monkeypatch.setattr(nccl_watchdog, "_PATIENT", 0.1)


@grid(case=CASES, size=[1, 2, 3, 4], cover=1)
def test_contract(case: Callable[[Communicator], None], size: int) -> None:
    run_ranks(size, case)


@pytest.mark.parametrize("size", [2, 3])
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
            assert started.wait(10)
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


def test_a_late_rank_is_named_and_later_calls_repeat_it() -> None:
    given_up = threading.Barrier(3, timeout=20)

    def fn(c: NcclCommunicator) -> None:
        c.barrier().wait()
        if c.rank != 1:
            c.all_reduce(torch.ones(2)).wait()
            deadline = time.monotonic() + 10
            while not c.session.ended and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 .*rank 1\b") as caught:
                c.all_reduce(torch.ones(2))
            assert caught.value.ranks == (1,)
            assert c._queue.endpoint._handle is None
        given_up.wait()
        c.abort()

    run_ranks(3, fn, timeout=0.4, signs=True)


def test_a_timeout_is_raised_by_the_work_that_was_stuck() -> None:
    world = World(2)
    world.stalled.add("broadcast")

    def fn(c: NcclCommunicator) -> None:
        work, behind = c.broadcast(torch.ones(2)), c.barrier()
        while not work.is_completed():
            time.sleep(0.01)
        for each in (work, work, behind):
            with pytest.raises(CollectiveTimeoutError, match=r"broadcast #0 .* within 0.2 s"):
                each.wait()
        with pytest.raises(CollectiveTimeoutError, match=r"broadcast #0 .* within 0.2 s"):
            c.barrier()

    run_ranks(2, fn, timeout=0.2, world=world)


def test_the_time_of_an_operation_starts_when_those_before_it_are_done() -> None:
    def fn(c: NcclCommunicator) -> None:
        works = []
        for _ in range(4):
            if c.rank == 1:
                time.sleep(0.2)
                c.barrier().wait()
            else:
                works.append(c.barrier())
        for work in works:
            work.wait()
        c.barrier().wait()

    run_ranks(2, fn, timeout=0.5)


@pytest.mark.parametrize(("status", "text"), [(2, "NCCL_ERROR number 2"), (6, "NCCL returned status 6")])
def test_an_asynchronous_error_ends_the_communicator(status: int, text: str) -> None:
    world = World(2)

    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            world.gpus[0].async_error = status
            c.all_reduce(torch.ones(1)).wait()
            while not c.session.ended:
                time.sleep(0.01)
            with pytest.raises(CommunicationError, match=rf"all_reduce #0 .*{text}"):
                c.barrier()
        c.abort()

    run_ranks(2, fn, world=world)


def test_abort_from_another_thread_releases_what_hangs() -> None:
    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            threading.Timer(0.1, c.abort).start()
            # The rank's thread is what waits in this simulation; on a GPU it is the stream.
            c.recv(torch.ones(1), 1).wait()
            with pytest.raises(CommunicationError, match="it was aborted"):
                c.barrier()
            with pytest.raises(CommunicationError, match="it was aborted"):
                c.split([0, 1])
        else:
            work = c.recv(torch.ones(1), 0)
            c.abort()
            c.abort()
            with pytest.raises(CommunicationError, match="it was aborted"):
                work.wait()

    run_ranks(2, fn)


def test_the_others_see_that_a_rank_gave_up() -> None:
    def fn(c: NcclCommunicator) -> None:
        pair, started = c.duplicate(), time.monotonic()
        if c.rank == 0:
            pair.abort("it had enough")
        else:
            pair.recv(torch.ones(1), 0).wait()
            with pytest.raises(RankLostError, match="it had enough") as caught:
                pair.barrier()
            assert caught.value.ranks == (0,)
            assert time.monotonic() - started < pair.timeout / 2
        c.barrier().wait()
        pair.close()

    run_ranks(2, fn, signs=True)


def test_pending_work_raises_after_an_abort_and_finished_work_does_not() -> None:
    def fn(c: NcclCommunicator) -> None:
        done = c.all_reduce(torch.ones(1))
        c.barrier().wait()
        queued = c.send(torch.ones(1), 1 - c.rank)
        c.abort()
        done.wait()
        with pytest.raises(CommunicationError, match="send was given up: it was aborted"):
            queued.wait()

    run_ranks(2, fn)


def test_close_can_be_repeated_and_frees_everything() -> None:
    world = World(2)

    def fn(c: NcclCommunicator) -> None:
        other = c.duplicate()
        for each in (other, c):
            each.close()
            each.close()
            with pytest.raises(CommunicationError, match="closed"):
                each.barrier()

    run_ranks(2, fn, world=world)
    assert [made.state for gpu in world.gpus for made in gpu.communicators] == ["destroyed"] * 4


def test_without_a_watch_nothing_goes_on() -> None:
    def fn(c: NcclCommunicator) -> None:
        def broken() -> None:
            raise OSError("libcuda.so.1: cannot open shared object file")

        c._queue.watchdog._prepare = broken
        work = c.all_reduce(torch.ones(1))
        while not c.session.ended:
            time.sleep(0.01)
        with pytest.raises(CommunicationError, match=r"all_reduce #0 .*libcuda\.so\.1"):
            c.barrier()
        assert work.is_completed()
        c.abort()

    run_ranks(2, fn)


def test_close_waits_for_the_other_ranks() -> None:
    closing: list[int] = []

    def fn(c: NcclCommunicator) -> None:
        time.sleep(0.2 * c.rank)
        closing.append(c.rank)
        c.close()
        assert sorted(closing) == [0, 1]

    run_ranks(2, fn)


def test_an_abort_explains_the_error_of_what_is_being_issued() -> None:
    def fn(c: NcclCommunicator) -> None:
        def broken(*arguments: int) -> None:
            c.session.abort("it was aborted")
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

        c._queue.endpoint._handle.allReduce = broken
        with pytest.raises(CommunicationError, match="all_reduce was given up: it was aborted"):
            c.all_reduce(torch.ones(1))
        c.abort()

    run_ranks(2, fn)


def test_an_error_while_issuing_ends_the_communicator() -> None:
    def fn(c: NcclCommunicator) -> None:
        def broken(*arguments: int) -> None:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

        c._queue.endpoint._handle.allReduce = broken
        for _ in range(2):
            with pytest.raises(CommunicationError, match=r"all_reduce #0 .* failed: .*NCCL_ERROR_SYSTEM_ERROR"):
                c.all_reduce(torch.ones(1))
        c.close()

    run_ranks(2, fn)


def test_a_rank_that_does_not_come_is_named() -> None:
    world, store = World(3), dist.HashStore()

    def fn(rank: int) -> None:
        if rank != 1:
            with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of 3 did not come") as caught:
                NcclCommunicator.over(store, rank, 3, key="k", device=CPU, timeout=0.2, runtime=world.runtime(rank))
            assert caught.value.ranks == (1,)

    world.run(fn)


def test_the_watch_ends_when_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watchdog, "_LINGER", 0.05)

    def fn(c: NcclCommunicator) -> None:
        for _ in range(2):
            c.barrier().wait()
            deadline = time.monotonic() + 5
            while c._queue.watchdog._thread is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert c._queue.watchdog._thread is None

    run_ranks(2, fn)


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
