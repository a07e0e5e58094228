"""Processes that join with a draft of the model: they train along at once, and come to the same bits as the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Draft, OuterLoop, algorithm, from_spec
from bagua_kernels.algorithms.wrapping import supply
from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.errors import CommunicationError
from bagua_kernels.optim import LAMB
from tests import limits
from tests.algorithms.test_healing import Net, step_of, vector
from tests.comm.conftest import no_thread_is_left
from tests.comm.membership.over_sockets import ends, listening
from tests.grids import grid

SECRET = Secret.from_text("known to the ranks of this test alone")
RANKS = 3
OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "lamb": lambda net: LAMB(net.parameters(), lr=0.01),
}


__all__ = ["no_thread_is_left"]  # a fixture of all tests here


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "_AT_ONCE", 0)
    monkeypatch.setattr(supply, "_LEAST", 256)
    monkeypatch.setattr(supply, "_MOST", 512)


def vector_of_common(model: OuterLoop) -> torch.Tensor:
    return torch.cat([each.clone() for each in model._common()])


def joined(spec: str, kind: str, loses: bool, steps: int) -> tuple[dict[int, Any], list[int]]:
    """Trains three ranks, and one that joins with a draft.

    Returns:
        For each rank that is left what it had at the end, and if it was behind then; and the steps after which one was.
    """
    doors: dict[int, tuple[str, int]] = {}
    found: dict[int, Any] = {}
    behind: list[int] = []
    outer: dict[int, list[torch.Tensor]] = {}
    near: list[bool] = []

    def trains(members: Membership, net: Net, optimizer: torch.optim.Optimizer) -> None:
        model = from_spec(spec, net, optimizer, communicator=members.communicator, on_failure="heal")
        if members.has_joined:
            near.append(bool((vector(net) - vector(Net())).abs().max() > 0))
        for step in range(model.stats().steps, steps):
            if step == 4 and members.name == 0:
                thread.start()
            if step == 8 and not members.has_joined:
                members.wait_for(RANKS + 1)
            if loses and members.name == 0 and step == 14:
                members._end("its process has ended")
                model.__exit__(CommunicationError, CommunicationError(), None)
                return
            step_of(model, optimizer, members.name, step)
            if model.is_behind:
                behind.append(step)
            elif isinstance(model, OuterLoop):
                outer.setdefault(model.rounds.finished, []).append(vector_of_common(model))
        own = vector(net)
        model.synchronize()
        found[members.name] = own, vector(net), model.is_behind
        model.close()
        ends(members)

    def joins() -> None:
        net = Net()
        optimizer = OPTIMIZERS[kind](net)
        draft = Draft(net, optimizer)
        members = arrive([doors[1], doors[2]], SECRET, limits.seconds(30.0), draft)
        assert draft.is_filled
        trains(members, net, optimizer)

    def member(communicator: LocalCommunicator) -> None:
        with listening(communicator, SECRET, doors) as members:
            net = Net()
            trains(members, net, OPTIMIZERS[kind](net))

    thread = threading.Thread(target=joins, daemon=True)
    run_ranks(RANKS, member, timeout=limits.seconds(20.0))
    thread.join(limits.seconds(20.0))
    assert len(found) == RANKS + 1 - loses
    assert near == [True]
    assert all(torch.equal(each, first) for first, *others in outer.values() for each in others)
    return found, behind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bagua_kernels.algorithms.OptimizerFitWarning")
@grid(
    spec=["bytegrad", "onebit:min_numel=0,exact=none,warmup_steps=0", "powersgd:rank=2"],
    kind=list(OPTIMIZERS),
    loses=[False, True],
    cover=1,
)
def test_a_new_member_comes_to_the_bits_of_the_others(spec: str, kind: str, loses: bool) -> None:
    """Also where the member is lost that gives, in the middle of that."""
    found, behind = joined(spec, kind, loses, 30)
    assert len(behind) > 3
    assert not any(each for *_, each in found.values())
    first = next(iter(found.values()))[0]
    assert all(torch.equal(each, first) for each, *_ in found.values())


@pytest.mark.slow
@grid(spec=["diloco:interval=2", "slow_mo:interval=2", "local_sgd:interval=2"], loses=[False, True], cover=1)
def test_outer_parameters_come_after_rounds(spec: str, loses: bool) -> None:
    """Those who are behind no more have the same as the others after the same round."""
    found, behind = joined(spec, "adamw", loses, 60)
    assert len(behind) > 3
    assert not any(each for *_, each in found.values())


def test_supplies_go_on_from_another_member_when_one_is_lost() -> None:
    """As the other tests have it with more algorithms."""
    for spec, steps in (("bytegrad", 30), ("diloco:interval=2", 60)):
        found, behind = joined(spec, "adamw", True, steps)
        assert len(behind) > 3
        assert not any(each for *_, each in found.values())
    means = [mean for _, mean, _ in found.values()]
    assert all(torch.equal(each, means[0]) for each in means)


def test_gossip_needs_no_more_than_the_draft() -> None:
    found, behind = joined("decentralized", "adamw", False, 20)
    assert not behind
    means = [mean for _, mean, _ in found.values()]
    assert all(torch.equal(each, means[0]) for each in means)
