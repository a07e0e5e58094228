"""States of QAdam and 1-bit Adam: saved, loaded, and of earlier versions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms.adam.frozen_adam import FrozenAdam
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.adam.simulation import CORRECTIONS, KINDS, Given, Kind, both, draw, may_be_frozen, parameters
from tests.grids import grid


@pytest.mark.slow
@may_be_frozen
@grid(
    corrected=CORRECTIONS,
    bucket_bytes=[1, 1000, 10 << 20],
    at=[2, 9],
    kind=KINDS,
    cover=1,
)
def test_resumed_training_has_the_same_bits(kind: Kind, at: int, bucket_bytes: int, corrected: dict[str, Any]) -> None:
    """Checkpoints before and after the freeze, in other objects; and buckets are laid out anew after the first pass.

    What becomes of the bias correction is part of the optimizer's state.
    """
    shapes = {"a": (16, 32), "b": (256,), "c": (13, 31), "d": (5,)}

    def go_on(model: MomentumAllReduce, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            model.optimizer.zero_grad()
            model(**{name: draw(step, rank, shape, name) for name, shape in shapes.items()}).backward()
            model.optimizer.step()

    def rank(communicator: Communicator) -> None:
        whole, begun, resumed = (
            kind(Given(**shapes), communicator=communicator, freeze_step=5, bucket_bytes=bucket_bytes, **options)
            for options in (corrected, corrected, {})
        )
        go_on(whole, communicator.rank, 0, 14)
        go_on(begun, communicator.rank, 0, at)
        states = copy.deepcopy((begun.module.state_dict(), begun.optimizer.state_dict(), begun.algorithm_state_dict()))
        go_on(begun, communicator.rank, at, 14)
        resumed.module.load_state_dict(states[0])
        resumed.optimizer.load_state_dict(states[1])
        resumed.load_algorithm_state_dict(states[2])
        go_on(resumed, communicator.rank, at, 14)
        for name, value in parameters(whole.module).items():
            assert torch.equal(value, parameters(begun.module)[name])
            assert torch.equal(value, parameters(resumed.module)[name])

    run_ranks(3, rank)


@may_be_frozen
def test_states_of_before_v_correction_was_an_option_go_on() -> None:
    """Their frozen v is corrected; one that is not frozen yet follows the constructor."""
    for frozen in (False, True):
        model = Given(w=(4, 4))
        optimizer = FrozenAdam(model.parameters(), freeze_step=2 if frozen else 5, v_correction="frozen")
        for step in range(3):
            model.w.grad = draw(step, 0, (4, 4))
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        del state["param_groups"][0]["v_correction"]
        other = Given(w=(4, 4))
        other.load_state_dict(model.state_dict())
        resumed = FrozenAdam(other.parameters(), freeze_step=5)
        resumed.load_state_dict(state)
        assert resumed.param_groups[0]["v_correction"] == ("frozen" if frozen else "continued")
        for one, net in ((optimizer, model), (resumed, other)):
            net.w.grad = draw(3, 0, (4, 4))
            one.step()
        assert torch.equal(model.w, other.w)


@both
def test_frozen_state_goes_on_with_one_rank(kind: Kind) -> None:
    def train(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=2)
        for step in range(3):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (16, 16))).backward()
            model.optimizer.step()
        return model.optimizer.state_dict(), model.module.state_dict()

    optimizer, module = run_ranks(2, train)[0]
    assert optimizer["param_groups"][0]["frozen"]
    v = optimizer["state"][0]["exp_avg_sq"].clone()

    def alone(communicator: Communicator) -> None:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=2)
        model.module.load_state_dict(module)
        model.optimizer.load_state_dict(optimizer)
        model(w=draw(3, 0, (16, 16))).backward()
        model.optimizer.step()
        assert model.optimizer.frozen
        assert torch.equal(model.optimizer.state[model.module.w]["exp_avg_sq"], v)

    run_ranks(1, alone)
