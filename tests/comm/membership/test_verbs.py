"""ULFM's verbs, by ranks that are threads: revoke, agree, shrink and grow, with ranks that are lost before and within them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, LocalCommunicator, Membership, Quota, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.membership import _REVOKED
from bagua_kernels.comm.membership.votes import MOST
from bagua_kernels.errors import CommunicationError, MembershipError
from tests import limits
from tests.comm.membership.over_sockets import ends, listening
from tests.grids import grid
from tests.limits import until

RANKS, TIMEOUT = 4, 5.0


def total(communicator: Communicator, value: float) -> float:
    """The sum of a number of each rank."""
    x = torch.full((3,), value)
    communicator.all_reduce(x).wait()
    return float(x[0])


def with_members(
    program: Callable[[Membership], Any], ranks: int = RANKS, terms: Quota | None = None, sockets: bool = False
) -> list[Any]:
    """Runs a program on members that are threads; one that returns early has ended without a word."""

    def run(communicator: LocalCommunicator) -> Any:
        if not sockets:
            return program(Membership(communicator, terms))
        striped = StripedCommunicator(communicator, stripes=1, host="127.0.0.1")
        members = Membership(striped, terms)
        try:
            return program(members)
        finally:
            members._end("its process has ended")
            striped.abort("the test ends")

    return run_ranks(ranks, run, timeout=TIMEOUT)


@grid(sockets=[False, True], victim=[0, 2], within=[False, True])
def test_shrink(sockets: bool, victim: int, within: bool) -> None:
    """After a loss, before an operation or within it, the others go on: with right sums, also on copies and splits."""
    first_done = threading.Barrier(RANKS, timeout=limits.seconds(20))

    def program(members: Membership) -> Any:
        assert total(members.communicator, 1.0) == RANKS
        first_done.wait()
        if members.name == victim:
            if within:
                members.communicator.send(torch.zeros(1), (victim + 1) % RANKS)
            return None
        with pytest.raises(CommunicationError):
            total(members.communicator, 1.0)
        communicator = members.shrink()
        assert communicator is members.communicator
        copy, pair = communicator.duplicate(), communicator.split([0, 1])
        sums = total(communicator, 10.0**members.name), total(copy, 1.0), pair and total(pair, 1.0)
        for each in (pair, copy):
            if each is not None:
                each.close()
        ends(members)
        return members.ranks, members.epoch, sums

    left = [rank for rank in range(RANKS) if rank != victim]
    found = [each for each in with_members(program, sockets=sockets) if each is not None]
    sums = [(sum(10.0**rank for rank in left), 3.0, 2.0 if at < 2 else None) for at in range(3)]
    assert found == [(tuple(left), 2, each) for each in sums]


def test_shrink_without_a_loss_begins_another_epoch_as_often_as_asked() -> None:
    def program(members: Membership) -> Any:
        for _ in range(6):
            assert total(members.shrink(), 1.0) == 3
        ends(members)
        return members.epoch, members.ranks

    assert with_members(program, 3) == [(7, (0, 1, 2))] * 3


def test_a_rank_is_lost_within_shrink() -> None:
    """Two are lost, of which one has just come to the end of the epoch."""
    reported = threading.Event()

    def program(members: Membership) -> Any:
        if members.name == 3:
            return None
        if members.name == 1:
            members._agreement.report({"its process": "ends now"})
            reported.set()
            return None
        assert reported.wait(limits.seconds(20))
        sums = total(members.shrink(), 1.0)
        ends(members)
        return members.ranks, sums

    assert with_members(program) == [((0, 2), 2.0), None, ((0, 2), 2.0), None]


@grid(sockets=[False, True], of=["it", "a copy", "a split"])
def test_revoke_ends_waits_on_all_members(sockets: bool, of: str) -> None:
    """Rank 0 revokes, and the others wait for it, on the epoch's communicator or one that was made of it."""
    begun = threading.Barrier(3, timeout=limits.seconds(20))

    def program(members: Membership) -> Any:
        communicator: Communicator | None = members.communicator
        assert communicator is not None
        # No timeout can end the waits within this test.
        communicator.set_timeout(limits.seconds(500))
        if of != "it":
            communicator = communicator.duplicate() if of == "a copy" else communicator.split([0, 1, 2])
        assert communicator is not None
        if members.name == 0:
            begun.wait()
            members.revoke("its loss is not a number")
        else:
            work = communicator.all_reduce(torch.ones(1))
            begun.wait()
            with pytest.raises(CommunicationError) as caught:
                work.wait()
            assert "rank 0 revoked it: its loss is not a number" in str(caught.value)
        # What rank 0 has left may end a wait before its letter ends all else.
        until(lambda: communicator.is_ended() and members.communicator.is_ended(), "the letter comes")
        for call in (communicator.barrier, members.communicator.duplicate, members.communicator.barrier):
            with pytest.raises(CommunicationError, match="rank 0 revoked it: its loss is not a number"):
                call()
        members.revoke("a second time")
        sums = total(members.shrink(), 1.0)
        ends(members)
        return members.epoch, members.losses, sums

    assert with_members(program, 3, sockets=sockets) == [(2, 0, 3.0)] * 3


def test_a_revocation_arrives_though_its_rank_is_lost_within_it() -> None:
    """Only rank 1 gets the letter of rank 0, and sends it on."""

    def program(members: Membership) -> Any:
        if members.name == 0:
            send = members._send
            members._send = lambda name, kind, body: send(name, kind, body) if name == 1 or kind != _REVOKED else None  # type: ignore[method-assign]
            members.revoke("it has seen a failure")
            until(lambda: len(seen) == RANKS - 1, lambda: f"others have the letter, not only {seen}")
            return None
        until(lambda: members._revoked[0] == 1, "the letter comes")
        seen.add(members.name)
        assert "it has seen a failure" in members._revoked[1]
        sums = total(members.shrink(), 1.0)
        ends(members)
        return members.ranks, sums

    seen: set[int] = set()
    assert with_members(program) == [None, *[((1, 2, 3), 3.0)] * 3]


def test_a_revocation_of_an_earlier_epoch_changes_nothing() -> None:
    def program(members: Membership) -> Any:
        members.revoke()
        members.shrink()
        members._hear_revocation(1, b'{"epoch": 1, "reason": "late"}')
        assert not members.has_changed
        assert total(members.communicator, 1.0) == 3
        ends(members)

    with_members(program, 3)


def test_agree_is_the_and_of_all() -> None:
    values = [(True, 0b1110, MOST), (True, 0b0111, MOST - 1), (False, 0b1111, MOST)]

    def program(members: Membership) -> Any:
        found = [members.agree(each) for each in values[members.name]]
        assert members.epoch == 1
        assert total(members.communicator, 1.0) == 3
        ends(members)
        return found

    assert with_members(program, 3) == [[0, 0b0110, MOST - 1]] * 3


@pytest.mark.parametrize("value", [-1, MOST + 1, 1.0, None])
def test_agree_refuses_what_is_no_set_of_flags(value: Any) -> None:
    def program(members: Membership) -> Any:
        with pytest.raises(ValueError, match=r"from 0 to 2\^63 - 1, got .*: give flags as bits"):
            members.agree(value)
        assert members.agree(5) == 5
        ends(members)
        with pytest.raises(CommunicationError, match="before shutdown"):
            members.agree(1)

    with_members(program, 1)


@grid(sockets=[False, True], when=["before", "within", "after"])
def test_agree_when_a_rank_is_lost(sockets: bool, when: str) -> None:
    """It counts on all of the others or on none of them. The communicator is of no use any more, nor needed."""
    victim = 0

    def program(members: Membership) -> Any:
        if members.name == victim and when == "before":
            return None
        if members.name == victim:
            if when == "within":
                # It has given its number, and does not wait for the result.
                members._votes.give(0b110)
            else:
                assert members.agree(0b1110) == 0b1010
            return None
        first = members.agree(0b1010 if when == "after" else 0b0111)
        until(members.communicator.is_ended, "the loss is known")
        with pytest.raises(CommunicationError):
            members.communicator.barrier()
        second = members.agree(0b100 | members.name)
        sums = total(members.shrink(), 1.0)
        third = members.agree(0b11)
        ends(members)
        return first, second, third, sums, members.ranks

    _, *found = with_members(program, sockets=sockets)
    assert found == [found[0]] * 3
    first, *rest = found[0]
    assert rest == [0b100 | (1 & 2 & 3), 0b11, 3.0, (1, 2, 3)]
    assert first in {"before": [0b111], "within": [0b111, 0b110], "after": [0b1010]}[when]


@pytest.mark.parametrize("seed", range(6))
def test_agree_many_times_while_ranks_are_lost(seed: int) -> None:
    """Those that are left have the same results, vote by vote."""
    draws = random.Random(seed)
    ends_at = {rank: draws.randrange(30) for rank in draws.sample(range(RANKS), 2)}
    halfway = {rank for rank in ends_at if draws.random() < 0.5}

    def program(members: Membership) -> Any:
        found = []
        for vote in range(30):
            if ends_at.get(members.name) == vote:
                if members.name in halfway:
                    members._votes.give(0)
                return found
            found.append(members.agree(MOST ^ (1 << members.name)))
        # Decisions that nobody can ask for any more are not kept.
        assert len(members._votes._agreement.ended) <= 3
        members.shrink()
        ends(members)
        return found

    results = with_members(program)
    whole = max(results, key=len)
    assert len(whole) == 30
    assert all(each == whole[: len(each)] for each in results)


def test_a_program_as_in_ulfm() -> None:
    """All agree whether an operation has succeeded, and repeat it otherwise: no rank uses a sum that another lacks."""

    def program(members: Membership) -> Any:
        communicator, sums = members.communicator, []
        while len(sums) < 6:
            if (members.name, len(sums)) in {(1, 2), (2, 4)}:
                return None
            try:
                value, ok = total(communicator, 1.0), True
            except CommunicationError as error:
                members.revoke(str(error))
                value, ok = 0.0, False
            if members.agree(ok):
                sums.append(value)
            else:
                communicator = members.shrink()
        ends(members)
        return sums

    expected = [4.0, 4.0, 3.0, 3.0, 2.0, 2.0]
    assert with_members(program) == [expected, None, None, expected]


def test_a_rank_that_does_not_come_is_left_out() -> None:
    """It answers, and calls something else. Those that agreed go on; the other one learns that it was left out."""
    agreed = threading.Barrier(3, timeout=limits.seconds(60))

    def program(members: Membership) -> Any:
        members._line.mailbox.timeout = 0.5
        if members.name != 1:
            result = members.agree(members.name | 0b100)
            agreed.wait()
            return result
        agreed.wait()
        with pytest.raises(MembershipError, match=r"rank 1 cannot agree in epoch 1: .*did not call agree\(\)"):
            members.agree(0)
        return None

    assert with_members(program, 3) == [0b100, None, 0b100]


def test_too_few_are_left_to_agree() -> None:
    def program(members: Membership) -> Any:
        if members.name == 2:
            return None
        with pytest.raises(MembershipError, match="2 of 3 ranks are left, and at least 3 have to be"):
            members.agree(1)
        return None

    with_members(program, 3, Quota(minimum=3))


def test_grow() -> None:
    """Members wait for another one, that has no followers; then all agree, in the epoch with it."""
    secret = Secret.from_text("known to the ranks of this test alone")
    doors: dict[int, tuple[str, int]] = {}
    found: dict[int, Any] = {}

    def end(members: Membership) -> None:
        found[members.name] = total(members.communicator, 1.0), members.agree(0b100 | members.name), members.ranks
        members.communicator.barrier().wait()
        ends(members)

    def joins() -> None:
        end(arrive([doors[0]], secret, limits.seconds(30.0)))

    def member(communicator: LocalCommunicator) -> None:
        with listening(communicator, secret, doors) as members:
            if members.name == 0:
                thread.start()
            assert members.grow(3) is members.communicator
            end(members)

    thread = threading.Thread(target=joins, daemon=True)
    run_ranks(2, member, timeout=limits.seconds(20.0))
    thread.join(limits.seconds(20.0))
    assert found == dict.fromkeys(range(3), (3.0, 4, (0, 1, 2)))
