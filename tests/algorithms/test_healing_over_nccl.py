"""Training that goes on when ranks are lost or join, over the stand-in for NCCL: streams wait, and no host does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import LocalCommunicator, Membership, NcclCommunicator, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.transports import NcclTransport
from tests import limits
from tests.algorithms.test_healing import ALIKE, RANKS, STEPS, parts_of, step_of, survivors, vector, wrapped
from tests.comm.backends.nccl.fake_nccl import World
from tests.comm.backends.nccl.nccl_members import CPU, Ended, ends, with_members
from tests.comm.membership.over_sockets import listening
from tests.grids import grid

SECRET = Secret.from_text("known to the ranks of this test alone")


@grid(spec=ALIKE, victim=[0, 2], cover=1)
def test_training_heals(spec: str, victim: int) -> None:
    """A rank is lost before a step. The others complete it with each other, and keep the same bits: those of threads as ranks."""

    def program(members: Membership) -> Any:
        net, optimizer = parts_of(spec)
        algorithm = wrapped(spec, members, net, optimizer)
        for step in range(STEPS):
            if (members.name, step) == (victim, 4):
                algorithm.__exit__(Ended, Ended(), None)
                raise Ended
            step_of(algorithm, algorithm.optimizer or optimizer, members.name, step)
        own = vector(net)
        algorithm.close()
        ends(members)
        return members.ranks, members.epoch, own

    found = [each for each in with_members(program, RANKS) if each is not None]
    left = tuple(rank for rank in range(RANKS) if rank != victim)
    assert [each[:2] for each in found] == [(left, 2)] * (RANKS - 1)
    assert all(torch.equal(each[2], found[0][2]) for each in found)
    expected = survivors(spec, {victim: 4})
    # NCCL divides in another order.
    torch.testing.assert_close(found[0][2], expected[0]["own"], rtol=1e-4, atol=1e-5)


def test_what_a_stream_waits_for_is_repeated_if_it_was_given_up() -> None:
    """All that a rank has received in a pass is void, though its `wait` has returned: the epoch ended before the pass did."""
    world = World(3)
    lost = threading.Event()

    def program(members: Membership) -> Any:
        net, optimizer = parts_of("allreduce")
        algorithm = from_spec("allreduce", net, optimizer, communicator=members.communicator, on_failure="heal")
        found = []
        engine = algorithm._engine  # type: ignore[attr-defined]
        wait = engine._wait

        def wait_and_lose() -> None:
            wait()
            if step == 2 and members.name == 1 and not lost.is_set():
                lost.set()
                # As if the watch had found an exchange that never ended; what is in the buckets is anything.
                for bucket in engine.buckets.all:
                    bucket.whole.fill_(torch.nan)
                engine.communicators[-1].session.abort("it was given up")

        engine._wait = wait_and_lose
        for step in range(4):
            step_of(algorithm, optimizer, members.name, step)
            found.append(vector(net))
        algorithm.close()
        ends(members)
        return members.epoch, found

    found = with_members(program, world=world)
    assert lost.is_set()
    assert [epoch for epoch, _ in found] == [2] * 3
    for _, each in found:
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(each, found[0][1], strict=True))


@pytest.mark.parametrize("spec", ["decentralized", "diloco:interval=2", "async_model_average"])
def test_algorithms_on_parameters_do_not_heal_over_nccl(spec: str) -> None:
    """They would use what they received before they learn of a failure."""

    def program(members: Membership) -> None:
        net, optimizer = parts_of(spec)
        with pytest.raises(ValueError, match="heals over sockets alone, got a NcclCommunicator: pass device='cpu'"):
            from_spec(spec, net, optimizer, communicator=members.communicator, on_failure="heal")
        ends(members)

    with_members(program, 2)


@pytest.mark.parametrize("loses", [False, True])
def test_a_process_joins(loses: bool) -> None:
    """The new epoch has a new communicator of NCCL, with it; it gets the model over it."""
    world = World(4)
    doors: dict[int, tuple[str, int]] = {}
    found: dict[int, Any] = {}
    arrived: list[threading.Thread] = []
    target = 4 - loses

    def trains(members: Membership) -> None:
        net, optimizer = parts_of("bytegrad")
        algorithm = from_spec("bytegrad", net, optimizer, communicator=members.communicator, on_failure="heal")
        for step in range(algorithm.stats().steps, STEPS):
            if loses and (members.name, step) == (0, 2):
                algorithm.__exit__(Ended, Ended(), None)
                members._end("its process has ended")
                return
            if step == 4 and not members.has_joined:
                if members.name == 1:
                    arrived[0].start()
                members.grow(target)
            step_of(algorithm, optimizer, members.name, step)
        assert isinstance(members.communicator, NcclCommunicator)
        algorithm.close()
        found[members.name] = members.ranks, vector(net)
        ends(members)

    def joins() -> None:
        trains(arrive([doors[1]], SECRET, limits.seconds(30.0), transport=NcclTransport(CPU, world.runtime(3))))

    def member(communicator: LocalCommunicator) -> None:
        transport = NcclTransport(CPU, world.runtime(communicator.rank))
        with listening(communicator, SECRET, doors, transport) as members:
            trains(members)

    arrived.append(threading.Thread(target=joins, daemon=True))
    run_ranks(3, member, timeout=limits.seconds(20.0))
    arrived[0].join(limits.seconds(20.0))
    world.end()
    ranks = (1, 2, 3) if loses else (0, 1, 2, 3)
    assert {name: each[0] for name, each in found.items()} == dict.fromkeys(ranks, ranks)
    assert all(torch.equal(each, found[1][1]) for _, each in found.values())
