"""Ranks that are threads, joined by sockets, and others that join them one after the other, or while one is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.algorithms.test_healing import parts_of, step_of, vector, wrapped
from tests.comm.membership.over_sockets import ends, listening, with_joiner

SECRET = Secret.from_text("known to the ranks of this test alone")
RANKS, COUNT, STEPS = 3, 3, 20


@pytest.mark.parametrize("spec", ["bytegrad", pytest.param("diloco:interval=3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loses", [False, True])
def test_processes_that_ask_while_another_one_arrives(spec: str, loses: bool) -> None:
    """They wait until it has all that it needs, and disturb nobody."""
    doors: dict[int, tuple[str, int]] = {}
    found: dict[int, Any] = {}
    changed = threading.Event()
    target = RANKS - loses + COUNT
    threads: list[threading.Thread] = []

    def trains(members: Membership) -> None:
        net, optimizer = parts_of(spec)
        algorithm = from_spec(spec, net, optimizer, communicator=members.communicator, on_failure="heal")
        for step in range(algorithm.stats().steps, STEPS):
            if step == 2 and members.name == 0:
                for place, each in enumerate(threads):
                    threading.Timer(0.1 * place, each.start).start()
            if step == STEPS // 2 and not members.has_joined:
                members.wait_for(target)
            if loses and members.name == 0 and changed.is_set():
                members._end("its process has ended")
                algorithm.__exit__(CommunicationError, CommunicationError(), None)
                return
            step_of(algorithm, optimizer, members.name, step)
        algorithm.synchronize()
        algorithm.close()
        found[members.name] = members.ranks, vector(net)
        ends(members)

    def joins() -> None:
        trains(arrive([doors[1], doors[2]], SECRET, limits.seconds(30.0)))

    def member(communicator: LocalCommunicator) -> None:
        with listening(communicator, SECRET, doors) as members:
            members.on_change(lambda _: changed.set())
            trains(members)

    threads += [threading.Thread(target=joins, daemon=True) for _ in range(COUNT)]
    run_ranks(RANKS, member, timeout=limits.seconds(20.0))
    for each in threads:
        each.join(limits.seconds(20.0))
    assert len(found) == target
    assert len({ranks for ranks, _ in found.values()}) == 1
    first = next(iter(found.values()))[1]
    assert all(torch.equal(each, first) for _, each in found.values())


@pytest.mark.parametrize(
    "spec",
    [
        "diloco:interval=3",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("bytegrad", "decentralized", "choco:eta=0.4", "wagma")
        ),
    ],
)
def test_a_rank_that_was_left_alone_is_joined(spec: str) -> None:
    found: dict[int, Any] = {}

    def trains(members: Membership, joiner: threading.Thread) -> None:
        net, optimizer = parts_of(spec)
        algorithm = from_spec(spec, net, optimizer, communicator=members.communicator, on_failure="heal")
        for step in range(algorithm.stats().steps, STEPS):
            if members.name == 1 and step == 5:
                members._end("its process has ended")
                algorithm.__exit__(CommunicationError, CommunicationError(), None)
                return
            if members.name == 0 and step == 8:
                assert members.ranks == (0,)
                joiner.start()
                limits.until(lambda: members.is_wanted, "a process asks")
            step_of(algorithm, optimizer, members.name, step)
        algorithm.synchronize()
        algorithm.close()
        found[members.name] = members.ranks, vector(net)
        ends(members)

    # Kernels may have to be compiled.
    with_joiner(2, SECRET, trains, 60.0)
    assert {name: ranks for name, (ranks, _) in found.items()} == {0: (0, 2), 2: (0, 2)}
    assert torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize(
    "spec",
    [
        "allreduce:apply_in_backward=True,bucket_bytes=1",
        "qadam:freeze_step=3",
        "diloco:interval=3",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("bytegrad", "powersgd:rank=2", "choco:eta=0.4", "wagma")
        ),
    ],
)
def test_a_job_that_begins_with_one_rank_is_joined(spec: str) -> None:
    """A parameter is frozen, which is compared when one joins."""
    found: dict[int, Any] = {}

    def trains(members: Membership, joiner: threading.Thread) -> None:
        net, optimizer = parts_of(spec)
        net.last.bias.requires_grad_(False)
        algorithm = wrapped(spec, members, net, optimizer)
        begin = algorithm.stats().steps
        for step in range(begin, STEPS):
            if members.name == 0 and step == 5:
                joiner.start()
                limits.until(lambda: members.is_wanted, "a process asks")
            step_of(algorithm, algorithm.optimizer or optimizer, members.name, step)
        algorithm.synchronize()
        found[members.name] = begin, algorithm.stats().steps, vector(net)
        algorithm.close()
        ends(members)

    # Kernels may have to be compiled.
    with_joiner(1, SECRET, trains, 60.0)
    assert {name: steps for name, (_, steps, _) in found.items()} == {0: STEPS, 1: STEPS}
    assert 4 <= found[1][0] <= 6
    assert torch.equal(found[0][2], found[1][2])
