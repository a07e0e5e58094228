"""A mailbox of thread ranks: as late as the contract allows, in virtual time, and without ranks that are lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import LocalCommunicator, Mailbox, Schedule, open_mailbox, run_ranks
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, RankLostError
from tests.comm.mailbox.cases import case_all_with_all, case_only_one_way, meet, value
from tests.comm.mailbox.traffic import random_traffic
from tests.grids import grid


def test_buffers_that_are_used_too_early_show() -> None:
    """An output is poison until `wait`; what is written to an input before `wait` of its sender is received."""

    def run(communicator: LocalCommunicator) -> None:
        box = open_mailbox(communicator)
        if box.rank == 0:
            early, late = torch.ones(3), torch.ones(3)
            works = [box.exchange({}, {1: tensor}, number) for number, tensor in enumerate((early, late))]
            early.fill_(2)
            works[1].wait()
            late.fill_(2)
            meet(box)
            works[0].wait()
        else:
            got = torch.zeros(2, 3)
            works = [box.exchange({0: got[number]}, {}, number) for number in range(2)]
            meet(box)
            assert all(work.is_completed() for work in works)
            assert bool(got.isnan().all())
            for work in works:
                work.wait()
            assert got.tolist() == [[2.0] * 3, [1.0] * 3]
        communicator.barrier().wait()

    run_ranks(2, run)


def test_lost_rank_concerns_its_partners_alone() -> None:
    """It is a world's rank; on a split its number differs. Its own mailbox is of no use any more."""

    def run(communicator: LocalCommunicator) -> None:
        part = communicator.split([1, 2, 3])
        if part is None:
            return
        box, world = open_mailbox(part), communicator._world
        meet(box, 0)
        if box.rank == 0:
            box.exchange({}, {1: value(0, 1, 5)}, 5).wait()
            world.lose(communicator.rank, "killed")
            with pytest.raises(CommunicationError, match="this rank was lost: killed"):
                box.exchange({1: torch.empty(1)}, {}, 6)
            return
        other, got = 3 - box.rank, torch.empty(5, dtype=torch.float64)
        for work in (box.exchange({0: got}, {}, 6), box.exchange({other: torch.empty(1), 0: got}, {}, 7)):
            with pytest.raises(RankLostError, match=r"rank 0 was lost \(killed\)") as caught:
                work.wait()
            assert caught.value.ranks == (0,)
        if box.rank == 1:
            box.exchange({0: got}, {}, 5).wait()
            assert got.equal(value(0, 1, 5))
        box.exchange({other: got}, {other: value(box.rank, other, 8)}, 8).wait()
        assert got.equal(value(other, box.rank, 8))
        assert box.lost() == {0: "killed"}
        part.split([1, 2])  # waits for nobody
        box.exchange({other: got}, {other: got.clone()}, 9).wait()

    run_ranks(4, run)


def test_time_is_virtual() -> None:
    """A timeout of five minutes passes in no time, and names the rank that did not come."""

    def run(communicator: LocalCommunicator) -> None:
        box = open_mailbox(communicator)
        clock = communicator._world.clock
        started = clock.now()
        if box.rank:
            with pytest.raises(CollectiveTimeoutError, match="within 300 s: rank 0 did not take part") as caught:
                box.exchange({0: torch.empty(1)}, {}, 0).wait()
            assert caught.value.ranks == (0,)
            assert clock.now() - started == pytest.approx(300)
            assert box.take() is None
            assert clock.now() - started == pytest.approx(600)
        else:
            schedule.sleep(550)
        communicator.barrier().wait()

    schedule = Schedule(0)
    run_ranks(3, run, timeout=300.0, schedule=schedule)


@pytest.mark.parametrize("case", [case_all_with_all, case_only_one_way])
def test_cases_in_any_order_of_the_threads(case: Callable[[Mailbox], None]) -> None:
    def run(communicator: LocalCommunicator) -> None:
        case(open_mailbox(communicator))
        communicator.barrier().wait()

    for seed in range(20):
        run_ranks(4, run, schedule=Schedule(seed))


def test_rank_that_left_is_lost_once_its_letters_have_arrived() -> None:
    def run(communicator: LocalCommunicator) -> None:
        box = open_mailbox(communicator)
        if box.rank == 0:
            for number in range(3):
                box.post(1, bytes([number]))
            box.leave()
            return
        with pytest.raises(RankLostError, match="rank 0 was lost"):
            box.exchange({0: torch.empty(1)}, {}, 0).wait()
        assert [box.take(0.0) for _ in range(4)] == [(0, b"\0"), (0, b"\1"), (0, b"\2"), None]

    for seed in range(10):
        run_ranks(2, run, schedule=Schedule(seed, latency=lambda draws: float(draws.uniform(0, 3))))


@grid(size=[2, 3, 5, 8], letters=["at once", "late"], cover=1)
def test_random_traffic_and_a_loss(size: int, letters: str) -> None:
    """Many orders of the threads, in each of which one rank leaves somewhere."""
    for seed in range(10):

        def run(communicator: LocalCommunicator, seed: int) -> None:
            random_traffic(open_mailbox(communicator), seed)

        latency = None if letters == "at once" else lambda draws: float(draws.uniform(0, 3))
        run_ranks(size, run, seed, schedule=Schedule(seed, latency=latency))
