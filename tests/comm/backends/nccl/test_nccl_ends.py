"""The communicator over NCCL, on a stand-in: late ranks, errors, aborts and closing."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bagua_kernels.comm.backends.nccl import watchdog as nccl_watchdog
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    RankLostError,
)
from tests.comm.backends.nccl.fake_cuda import LIMIT
from tests.comm.backends.nccl.fake_nccl import World, run_ranks
from tests.comm.backends.nccl.waiting import await_end, await_heartbeats, go_on

pytestmark = pytest.mark.usefixtures("short_breaks")


def test_a_late_rank_is_named_and_later_calls_repeat_it() -> None:
    entered, given_up = threading.Barrier(2, timeout=LIMIT), threading.Barrier(3, timeout=LIMIT)

    def fn(c: NcclCommunicator) -> None:
        c.barrier().wait()
        if c.rank != 1:
            work = c.all_reduce(torch.ones(2))
            # The time is up only when each of the two knows that the other one is in it.
            entered.wait()
            await_heartbeats(c)
            c.set_timeout(0.1)
            for call in (lambda: go_on(c, work), lambda: c.all_reduce(torch.ones(2))):
                with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 .*rank 1\b") as caught:
                    call()
                assert caught.value.ranks == (1,)
            assert c._queue.endpoint._handle is None
        given_up.wait()
        c.abort()

    run_ranks(3, fn, signs=True)


def test_a_timeout_is_raised_by_the_work_that_was_stuck() -> None:
    world = World(2)
    world.stalled.add("broadcast")

    def fn(c: NcclCommunicator) -> None:
        work, behind = c.broadcast(torch.ones(2)), c.barrier()
        c.set_timeout(0.2)
        await_end(c)
        assert work.is_completed()
        for each in (work, work, behind):
            with pytest.raises(CollectiveTimeoutError, match=r"broadcast #0 .* within 0.2 s"):
                each.wait()
        with pytest.raises(CollectiveTimeoutError, match=r"broadcast #0 .* within 0.2 s"):
            c.barrier()

    run_ranks(2, fn, world=world)


def test_the_time_of_an_operation_starts_when_those_before_it_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(nccl_watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    issued, ended = threading.Barrier(2, timeout=LIMIT), threading.Barrier(2, timeout=LIMIT)

    def fn(c: NcclCommunicator) -> None:
        nonlocal now
        looks = threading.Semaphore(0)
        c.session.finished = lambda number: looks.release()
        works = [c.barrier() for _ in range(4)] if c.rank == 0 else []
        issued.wait()
        for _ in range(4):
            if c.rank == 1:
                now += 0.6 * c.timeout
                c.barrier().wait()
            # The time of the next one starts when the watch has seen this one end.
            assert looks.acquire(timeout=LIMIT)
            ended.wait()
        for work in works:
            work.wait()
        c.barrier().wait()

    run_ranks(2, fn)


@pytest.mark.parametrize(("status", "text"), [(2, "NCCL_ERROR number 2"), (7, "NCCL returned status 7")])
def test_an_asynchronous_error_ends_the_communicator(status: int, text: str) -> None:
    world = World(2)

    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            world.gpus[0].async_error = status
            work = c.all_reduce(torch.ones(1))
            with pytest.raises(CommunicationError, match=rf"all_reduce #0 .*{text}"):
                go_on(c, work)
        c.abort()

    run_ranks(2, fn, world=world)


def test_abort_from_another_thread_releases_what_hangs() -> None:
    def fn(c: NcclCommunicator) -> None:
        if c.rank == 0:
            threading.Timer(0.1, c.abort).start()
            # The rank's thread is what waits in this simulation; on a GPU it is the stream.
            with pytest.raises(CommunicationError, match="it was aborted"):
                go_on(c, c.recv(torch.ones(1), 1))
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
        pair = c.duplicate()
        # No timeout can end the wait within this test.
        pair.set_timeout(100 * LIMIT)
        if c.rank == 0:
            pair.abort("it had enough")
        else:
            with pytest.raises(RankLostError, match="it had enough") as caught:
                go_on(pair, pair.recv(torch.ones(1), 0))
            assert caught.value.ranks == (0,)
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
        await_end(c)
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


def test_the_watch_ends_when_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watchdog, "_LINGER", 0.05)

    def fn(c: NcclCommunicator) -> None:
        for _ in range(2):
            c.barrier().wait()
            deadline = time.monotonic() + LIMIT
            while c._queue.watchdog._thread is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert c._queue.watchdog._thread is None

    run_ranks(2, fn)
