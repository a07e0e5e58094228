"""Members whose communicators are NCCL's, on a stand-in: each epoch has a new one, of the ranks that are left or that join."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels import comm, knobs
from bagua_kernels.comm import Communicator, LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership import transports
from bagua_kernels.comm.membership.agreement import Quota
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.transports import LineTransport, NcclTransport
from bagua_kernels.comm.rendezvous import _membership
from bagua_kernels.comm.work import Work
from bagua_kernels.errors import BackendUnavailableError, CommunicationError, MembershipError, MismatchError
from tests import limits
from tests.comm.backends.nccl.fake_cuda import Wait
from tests.comm.backends.nccl.fake_nccl import World
from tests.comm.backends.nccl.nccl_members import CPU, Ended, ends, with_members
from tests.comm.contract import CASES
from tests.grids import grid, one_of_each
from tests.limits import until

SECRET = Secret.from_text("known to the ranks of this test alone")

pytestmark = pytest.mark.usefixtures("short_breaks")


def total(communicator: Communicator, value: float = 1.0) -> float:
    """The sum of a number of each rank, once the operation has ended."""
    x = torch.full((3,), value)
    communicator.all_reduce(x).wait()
    communicator.drain()
    return float(x[0])


def fails(communicator: Communicator, work: Work | None) -> None:
    """Waits for an operation, begun now if there is none, whose error shows in `wait`, or at the latest when it has ended."""
    try:
        (communicator.all_reduce(torch.ones(2)) if work is None else work).wait()
    except CommunicationError:
        return
    with pytest.raises(CommunicationError):
        communicator.drain()


def states(world: World) -> list[list[str]]:
    """What has become of each GPU's communicators, in the order in which they were made."""
    return [[made.state for made in gpu.communicators] for gpu in world.gpus]


@grid(case=one_of_each(CASES), size=[2, 3], cover=1)
def test_contract(case: Callable[[Communicator], None], size: int) -> None:
    def program(members: Membership) -> None:
        assert isinstance(members.communicator, NcclCommunicator)
        case(members.communicator)
        ends(members)

    with_members(program, size)


@grid(victim=[0, 2], within=[False, True])
def test_the_others_go_on_with_a_new_communicator(victim: int, within: bool) -> None:
    """The old one is aborted, and nobody waits for it: with a stalled all_reduce of all ranks it would never end."""
    world = World(3)
    begun = threading.Barrier(3, timeout=limits.seconds(20))

    def program(members: Membership) -> Any:
        old = members.communicator
        assert total(old) == 3
        # A rank that learns of a loss meanwhile raises, though the sum has come.
        begun.wait()
        # No timeout can end the wait within this test.
        old.set_timeout(limits.seconds(500))
        if within:
            world.stalled.add("allReduce")
            begun.wait()
            work = old.all_reduce(torch.ones(2))
            begun.wait()
        if members.name == victim:
            raise Ended
        fails(old, work if within else None)
        communicator = members.shrink()
        world.stalled.clear()
        assert isinstance(communicator, NcclCommunicator)
        assert communicator is not old
        copy, single = communicator.duplicate(), communicator.split([1])
        found = members.ranks, total(communicator, 10.0**members.name), total(copy), single and total(single)
        for each in (copy, single):
            if each is not None:
                each.close()
        ends(members)
        return found

    left = [rank for rank in range(3) if rank != victim]
    found = [each for each in with_members(program, world=world) if each is not None]
    assert found == [(tuple(left), sum(10.0**rank for rank in left), 2.0, 1.0 if at else None) for at in range(2)]
    assert [states(world)[rank] for rank in left] == [["aborted", "destroyed", "destroyed"]] * 2


def test_ranks_are_lost_one_after_the_other_until_one_is_left() -> None:
    """All agree whether an operation has succeeded, as a program does that handles losses itself."""

    def program(members: Membership) -> Any:
        found: list[float] = []
        while len(found) < 4:
            if members.name == 4 - len(found):
                raise Ended
            try:
                value, ok = total(members.communicator), True
            except CommunicationError as error:
                members.revoke(str(error))
                value, ok = 0.0, False
            if members.agree(ok):
                found.append(value)
            else:
                members.shrink()
        ends(members)
        return found, members.epoch, type(members.communicator)

    assert with_members(program, 4)[0] == ([4.0, 3.0, 2.0, 1.0], 4, NcclCommunicator)


def test_revoke_and_agree() -> None:
    """Verbs need no GPU: letters go over the members' own connections."""
    begun = threading.Barrier(3, timeout=limits.seconds(20))

    def program(members: Membership) -> Any:
        copy = members.communicator.duplicate()
        work = copy.all_reduce(torch.ones(1)) if members.name else None
        begun.wait()
        if work is None:
            members.revoke("its loss is not a number")
        until(lambda: members.communicator.is_ended() and copy.is_ended(), "the letter comes")
        if work is not None:
            with pytest.raises(CommunicationError, match="rank 0 revoked it: its loss is not a number"):
                work.wait()
        agreed = members.agree(0b10 | members.name)
        sums = total(members.shrink())
        ends(members)
        return agreed, sums, members.losses

    assert with_members(program) == [(0b10, 3.0, 0)] * 3


def test_an_error_of_nccl_itself_makes_another_communicator() -> None:
    world, begun = World(3), threading.Barrier(3, timeout=limits.seconds(20))

    def program(members: Membership) -> Any:
        old = members.communicator
        if members.name == 1:
            world.gpus[1].async_error = 2
            world.stalled.add("allReduce")
        begun.wait()
        work = old.all_reduce(torch.ones(2))
        if members.name == 1:
            until(old.is_ended, "the watch sees the error")
            world.gpus[1].async_error = 0
            world.stalled.clear()
            members.revoke("NCCL has failed")
        fails(old, work)
        sums = total(members.shrink())
        ends(members)
        return sums, members.ranks

    assert with_members(program, world=world) == [(3.0, (0, 1, 2))] * 3


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_rank_is_lost_while_nccl_connects(epoch: int) -> None:
    """The others are in a call of NCCL that never comes back, and that nothing can abort."""
    world = World(3)
    made = 0

    def runtime(rank: int) -> Any:
        found = world.runtime(rank)
        if rank != 2:
            return found

        def connect(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made == epoch:
                raise Ended
            return world.gpus[2].NcclCommunicator(*arguments)

        return replace(found, nccl=SimpleNamespace(NcclCommunicator=connect))

    def program(members: Membership) -> Any:
        sums = total(members.shrink())
        ends(members)
        return members.ranks, members.epoch, sums

    if epoch == 1:
        with pytest.raises(CommunicationError, match="epoch 1 ends as it begins"):
            with_members(program, world=world, runtime=runtime)
        world.end()
    else:
        assert with_members(program, world=world, runtime=runtime) == [*[((0, 1), 3, 2.0)] * 2, None]


def test_a_rank_is_lost_while_a_copy_connects() -> None:
    """Here, too, the epoch ends, and so does the wait."""
    world = World(3)

    def program(members: Membership) -> Any:
        if members.name == 2:
            # It gets the id of the copy, and ends.
            ids = members.communicator._ids.split("all.1", (0, 1, 2))  # type: ignore[attr-defined]
            ids.share(2, 3, 1.0, lambda: b"")
            raise Ended
        with pytest.raises(CommunicationError):
            members.communicator.duplicate()
        sums = total(members.shrink())
        ends(members)
        return sums

    assert with_members(program, world=world) == [2.0, 2.0, None]


def test_a_gpu_that_does_not_end_what_was_aborted_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may still be written to. The others go on."""
    monkeypatch.setattr(transports, "_PATIENCE", 0.2)
    world = World(3)

    def program(members: Membership) -> Any:
        if members.name == 1:
            never = world.gpus[1].Event()
            never.done = False
            stream = members.communicator._queue.endpoint.stream  # type: ignore[attr-defined]
            with world.changed:
                stream.put(Wait(never))
            try:
                with pytest.raises(
                    MembershipError, match=r"still runs what was aborted 0.2 s ago; let this process end"
                ):
                    members.shrink()
            finally:
                never.done = True
            return None
        sums = total(members.shrink())
        ends(members)
        return members.ranks, sums

    assert with_members(program, world=world) == [((0, 2), 2.0), None, ((0, 2), 2.0)]


def test_a_gpu_that_has_failed_leaves_the_job() -> None:
    """A context that failed serves no communicator any more."""

    def program(members: Membership) -> Any:
        if members.name == 1:

            def broken() -> Any:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            members._transport._last._runtime.cuda.Event = broken  # type: ignore[attr-defined]
            with pytest.raises(MembershipError, match="it has failed: CUDA error: an illegal memory access"):
                members.shrink()
            return None
        sums = total(members.shrink())
        ends(members)
        return members.ranks, sums

    assert with_members(program) == [((0, 2), 2.0), None, ((0, 2), 2.0)]


def test_all_ranks_learn_that_one_lacks_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_binding, "unavailable", lambda: "there is none")
    world = World(3)

    def run(anchor: LocalCommunicator) -> None:
        transport = NcclTransport(CPU, None if anchor.rank == 1 else world.runtime(anchor.rank))
        with pytest.raises(BackendUnavailableError, match="on every rank: rank 1: there is none"):
            Membership(anchor, transport=transport)

    run_ranks(3, run, timeout=limits.seconds(10.0))


def test_a_process_with_tensors_elsewhere_is_refused() -> None:
    world = World(1)
    members = Membership(
        LocalCommunicator.alone(limits.seconds(20.0)), secret=SECRET, transport=NcclTransport(CPU, world.runtime(0))
    )
    members.listen("127.0.0.1", 0)
    assert members.address is not None
    with pytest.raises(
        MismatchError, match="the job has tensors on 'cuda', and this process on 'cpu': pass its device"
    ):
        arrive([members.address], SECRET, limits.seconds(20.0))
    members.close()


def test_init_takes_cupy_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which others may join."""
    monkeypatch.setattr(nccl_binding, "unavailable", lambda: "")
    monkeypatch.setattr(nccl_binding, "load", lambda: World(1).runtime(0))
    given = {"elastic": True, "device": "cuda:0", "listen": "127.0.0.1:0"}
    with pytest.raises(
        ValueError, match=r"got device=cuda:0 and BAGUA_KERNELS_NCCL=torch: set BAGUA_KERNELS_NCCL=cupy"
    ):
        comm.init(**given)  # type: ignore[arg-type]
    with knobs.override(knobs.NCCL, "cupy"), knobs.override(knobs.SECRET, "of this test"):
        try:
            communicator = comm.init(**given)  # type: ignore[arg-type]
            assert isinstance(communicator, NcclCommunicator)
            assert communicator.device == torch.device("cuda:0")
            assert communicator.members.address is not None
        finally:
            comm.shutdown()


def test_gloo_alone_is_refused() -> None:
    anchor: Any = SimpleNamespace(size=2)
    with pytest.raises(
        ValueError, match=r"sockets of this package's own, got a SimpleNamespace: leave BAGUA_KERNELS_SOCKETS"
    ):
        _membership(anchor, Quota(), LineTransport())
