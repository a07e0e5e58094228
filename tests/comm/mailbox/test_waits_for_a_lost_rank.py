"""Waits end when a rank that they need is lost, and not at their timeout, which never comes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms.models.letters import Letters
from bagua_kernels.comm import Communicator, Mailbox, Schedule, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.group_mean import group_mean
from bagua_kernels.comm.mailbox.groups import Whole
from bagua_kernels.comm.mailbox.pairwise import PairwiseAverage, Plain
from bagua_kernels.comm.mailbox.quorum import Quorum
from bagua_kernels.comm.mailbox.rests import Rests
from bagua_kernels.comm.mailbox.triggered import TriggeredAverage
from bagua_kernels.errors import RankLostError
from tests import limits
from tests.comm.backends.sockets.common import leaving_nothing, until
from tests.comm.mailbox.common import LEAVE, LETTER, by_hand, frame
from tests.comm.mailbox.pairwise_runs import exact_half
from tests.comm.mailbox.triggered_runs import Model, exact_mean
from tests.grids import grid

VICTIM, MOMENT = 1, 5.0
Wait = Callable[[], object]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


def triggered(courier: Courier, period: int | None) -> TriggeredAverage:
    mailbox = courier.mailbox
    mean = partial(group_mean, mailbox, mean=exact_mean)
    return TriggeredAverage(
        courier,
        Whole(mailbox.size),
        period,
        Model(courier, mailbox.rank),
        group_mean=lambda members, _, vector, number: mean(members, vector, number),
    )


def rest_of_groups(courier: Courier) -> Wait:
    return triggered(courier, None).rest


def rest_after_a_version(courier: Courier) -> Wait:
    """Of which the lost rank has no part."""
    average = triggered(courier, None)

    def wait() -> None:
        average.arrive(0)
        average.rest()

    return wait


def synchronising_version(courier: Courier) -> Wait:
    """For which all training threads wait."""
    average = triggered(courier, 1)

    def wait() -> None:
        average.arrive(0)
        average.wait(0)

    return wait


def rest_of_pairs(courier: Courier) -> Wait:
    size, rank = courier.mailbox.size, courier.mailbox.rank
    neighbours = [(rank + 1) % size, (rank - 1) % size]
    return PairwiseAverage(courier, neighbours, Model(courier, rank), wire=Plain(exact_half)).rest


def quorum(courier: Courier, count: int) -> Quorum:
    return Quorum(courier, count, 0.0, buffers=lambda part: [torch.empty(3)], merge=lambda part, posts: None)


def rest_of_a_quorum(courier: Courier) -> Wait:
    """Which needs all ranks."""
    made = quorum(courier, courier.mailbox.size)
    return lambda: made.rest(lambda: None)


def merge(courier: Courier) -> Wait:
    """Which needs all ranks."""
    made = quorum(courier, courier.mailbox.size)

    def wait() -> None:
        made.post(0, 1.0, [torch.ones(3)])
        made.wait(0, 0)

    return wait


WAITS = [rest_of_groups, rest_after_a_version, synchronising_version, rest_of_pairs, rest_of_a_quorum, merge]


def ends_at_once(wait: Wait, schedule: Schedule) -> None:
    """Asserts that a wait raises the error of the lost rank when it is lost, by the clock that the ranks run by."""
    with pytest.raises(RankLostError) as caught:
        wait()
    assert caught.value.ranks == (VICTIM,)
    assert MOMENT <= schedule.now() <= MOMENT + 3


@grid(make=WAITS, how=["lost", "left"], cover=1)
def test_a_courier_ends_waits(make: Callable[[Courier], Wait], how: str) -> None:
    schedule = Schedule(0, latency=lambda draws: draws.uniform(0, 0.5))

    def rank(communicator: Any) -> None:
        courier = Courier(open_mailbox(communicator))
        wait = make(courier)
        courier.start()
        if communicator.rank == VICTIM:
            schedule.sleep(MOMENT)
            if how == "left":
                courier.end()
            return
        ends_at_once(wait, schedule)
        courier.end()

    run_ranks(3, rank, timeout=limits.NEVER, schedule=schedule)


def test_ranks_that_wait_at_a_call_end() -> None:
    schedule = Schedule(0)

    def rank(communicator: Communicator) -> None:
        letters = Letters(open_mailbox(communicator))
        if communicator.rank == VICTIM:
            schedule.sleep(MOMENT)
            return
        letters.arrive("join", 0, 0)
        ends_at_once(lambda: letters.wait_for_more(0, 0), schedule)

    run_ranks(3, rank, timeout=limits.NEVER, schedule=schedule)


@pytest.mark.parametrize("end", ["breaks", "leaves", "while letters come"])
def test_a_connection_that_ends_is_looked_at(end: str) -> None:
    """Over sockets, where it brings no letter; one of another rank may come at that moment."""
    with by_hand(2, timeout=limits.NEVER) as box:
        courier = Courier(box)
        rests = Rests(courier)
        courier.start()
        rests.begin()
        if end == "while letters come":

            def close(sender: int, _: bytes) -> None:
                box.letters[VICTIM].close()
                until(lambda: VICTIM in box.lost())

            courier.on(7, close)
            box.letters[2].sendall(frame(LETTER, bytes([7])) * 3)
        else:
            if end == "leaves":
                box.letters[VICTIM].sendall(frame(LEAVE, b"it left: enough"))
                box.tensors[VICTIM].close()
            box.letters[VICTIM].close()
        with pytest.raises(RankLostError, match="rank 1 was lost") as caught:
            rests.wait()
        assert caught.value.ranks == (VICTIM,)
        courier.end()


def test_who_posts_after_the_end_of_a_courier_is_told_why_it_ended() -> None:
    """Rather than that the mailbox cannot be used: the courier may have left it just now."""

    def rank(communicator: Communicator) -> None:
        courier = Courier(open_mailbox(communicator))

        def lose() -> bool:
            raise RankLostError("rank 1 was lost (it slept)", [VICTIM])

        if communicator.rank == 0:
            courier.work(lose)
            courier.start()
            with pytest.raises(RankLostError):
                courier.wait_for(bool)
            with pytest.raises(RankLostError, match=r"the courier of rank 0 ended: rank 1 was lost") as caught:
                courier.post(1, 7, b"")
            assert caught.value.ranks == (VICTIM,)
        communicator.barrier().wait()
        courier.end()

    run_ranks(2, rank, schedule=Schedule(0))


def test_who_knows_of_a_loss_waits_for_letters() -> None:
    """And who does not ask for losses, too."""

    def look(box: Mailbox, send: Callable[[], object]) -> None:
        assert box.take(limits.NEVER, {}) is None
        lost = dict(box.lost())
        assert lost.keys() == {VICTIM}
        assert box.take(0.01, lost) is None
        send()
        assert box.take(limits.NEVER, lost) == (2, b"x")
        send()
        assert box.take(limits.NEVER) == (2, b"x")

    with by_hand(2) as box:
        box.letters[VICTIM].close()
        look(box, lambda: box.letters[2].sendall(frame(LETTER, b"x")))

    def rank(communicator: Communicator) -> None:
        box = open_mailbox(communicator)
        if communicator.rank == 0:
            look(box, lambda: box.post(2, b"please"))
        while communicator.rank == 2 and box.take() is not None:
            box.post(0, b"x")

    run_ranks(3, rank, schedule=Schedule(0))
