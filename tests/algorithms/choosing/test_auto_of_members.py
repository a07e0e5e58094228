"""AutoTune where ranks are lost: those that are left measure and choose anew, and owe nothing less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import AutoTune
from bagua_kernels.algorithms.choosing import chooser
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.exchanges.repaying import Repaying
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, LocalCommunicator, Membership, run_ranks
from tests import limits
from tests.algorithms.test_healing import Net, lose_the_barrier, step_of, vector

RANKS, TIMEOUT = 4, 5.0


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "BLOCK", 1)


def trains(communicator: Communicator, steps: int, ends: dict[int, int], loses: int | None) -> dict[str, Any] | None:
    """Trains; some ranks end before a step, and one loses the end of a pass."""
    name, members = communicator.rank, Membership(communicator)
    net = Net()
    model = AutoTune(
        net,
        torch.optim.SGD(net.parameters(), lr=0.2),
        communicator=members.communicator,
        on_failure="heal",
    )
    model.search.exact_steps = 2
    states = []
    for step in range(steps):
        if ends.get(name) == step:
            return None
        engine = model._engine
        assert engine is not None
        if (name, step) == (1, loses):
            lose_the_barrier(engine.communicators[0])
        optimizer = model.optimizer
        assert optimizer is not None
        step_of(model, optimizer, name, step)
        states.append((members.epoch, model.search.state, model.chooser.used.label))
    found = {"states": states, "own": vector(net), "tried": list(model.search.tried), "facts": model.facts}
    model.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def survivors(steps: int, ends: dict[int, int], loses: int | None = None) -> list[dict[str, Any]]:
    found = run_ranks(RANKS, trains, steps, ends, loses, timeout=limits.seconds(TIMEOUT))
    left = [each for each in found if each is not None]
    for each in left:
        assert torch.equal(each["own"], left[0]["own"])
        assert each["facts"] == left[0]["facts"]
        # In an epoch that has begun ranks are at the same place; when it begins they may be in two passes.
        assert each["states"][-1] == left[0]["states"][-1]
    return left


@pytest.mark.parametrize("at", [1, 2, 5, 30])
def test_those_who_are_left_begin_anew(at: int) -> None:
    """While exact means are measured, when they have been, in a trial, and after a choice."""
    found = survivors(at + 8, {2: at})
    assert len(found) == RANKS - 1
    for each in found:
        epochs = [epoch for epoch, *_ in each["states"]]
        first = epochs.index(2)
        assert each["states"][first][1:] == ("measuring", each["states"][0][2])
        assert each["states"][-1][1] != "measuring"
        assert each["facts"] is not None


def test_a_lost_end_of_a_pass_counts_on_no_rank() -> None:
    """Rank 1 does not learn that others have come to the end of a pass, behind which all compare its seconds."""
    for at in (1, 4):
        found = survivors(at + 10, {}, loses=at)
        assert len(found) == RANKS
        assert found[0]["facts"] is not None


def test_a_rank_that_is_left_alone_chooses_nothing() -> None:
    (found,) = survivors(14, {0: 5, 1: 5, 2: 6})
    assert found["states"][-1][1] == "measuring"


def test_what_is_owed_is_still_owed_after_a_pass_that_is_lost() -> None:
    """An exchange that pays in a pass goes back to what it owed before."""

    def program(communicator: LocalCommunicator) -> None:
        bucket = Bucket([torch.zeros(5)], align=1, index=0, names=["x"])
        exchange = Repaying(Mean(bucket, communicator), {"x": torch.arange(5.0)})
        back = exchange.mark([])
        for work in exchange.run(0):
            work.wait()
        assert torch.equal(bucket.views[0], torch.arange(5.0))
        assert exchange.paid
        assert torch.equal(back()["worker"]["x"], torch.arange(5.0))
        assert exchange.own_state() == {}

    run_ranks(2, program)
