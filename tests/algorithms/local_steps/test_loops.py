"""Local steps in training loops as users write them."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import DiLoCo, LocalSGD, OuterNesterov
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.algorithms.gossip.common import Quadratic, flat
from tests.algorithms.local_steps.common import ALL, Case
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

every = grid(cover=1, case=ALL)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


@grid(case=ALL, size=[2, 3], kind=[torch.optim.AdamW, optim.AdamW], cover=1)
def test_resumes_bit_for_bit_in_the_middle_of_a_round(case: Case, size: int, kind: Any) -> None:
    def rank(communicator: Communicator) -> None:
        runs = []
        for part in (False, True):
            module = Odd()
            optimizer = kind(module.parameters(), lr=0.01)
            model = case.make(module, optimizer, communicator)
            train(model, optimizer, communicator.rank, range(6))
            state = copy.deepcopy(model.algorithm_state_dict())
            if part:
                model.close()
                trained = {name for name, p in module.named_parameters() if p.requires_grad}
                module, frozen = Odd(seed=communicator.rank + 1), module.state_dict()
                module.load_state_dict({**module.state_dict(), **{k: v for k, v in frozen.items() if k not in trained}})
                optimizer = kind(module.parameters(), lr=0.01)
                model = case.make(module, optimizer, communicator)
                model.load_algorithm_state_dict(state)
                assert model.stats().steps == 6
            train(model, optimizer, communicator.rank, range(6, 13))
            model.wait()
            runs.append(flat(module))
            model.close()
        assert torch.equal(*runs)

    run_ranks(size, rank)


@pytest.mark.parametrize("name", ["diloco", "slow_mo", "diloco, sign", "sparse_loco"])
def test_goes_on_with_another_number_of_ranks(name: str) -> None:
    """Outer parameters and momentum are those of before, residuals the mean."""
    case = ALL[name]

    def first(communicator: Communicator) -> tuple[Any, torch.Tensor]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = case.make(module, optimizer, communicator)
        train(model, optimizer, communicator.rank, range(9))
        state = copy.deepcopy(model.algorithm_state_dict())
        model.close()
        return state, flat(module)

    before = run_ranks(3, first)
    states = [state for state, _ in before]

    def second(communicator: Communicator) -> Any:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = case.make(module, optimizer, communicator)
        model.load_algorithm_state_dict(states)
        state, parameters = copy.deepcopy(model.algorithm_state_dict()), flat(module)
        train(model, optimizer, communicator.rank, range(9, 14))
        model.close()
        return state, parameters

    for state, parameters in run_ranks(2, second):
        mean = torch.stack([x.double() for _, x in before]).mean(0)
        assert torch.allclose(parameters.double(), mean, atol=1e-6)
        for key, named in states[0]["vectors"].items():
            for parameter, values in named.items():
                everywhere = torch.stack([one["vectors"][key][parameter].double() for one in states])
                if key not in ("worker", "residual"):
                    assert (everywhere == values).all() or key == "owner"
                assert torch.allclose(state["vectors"][key][parameter].double(), everywhere.mean(0), atol=1e-6), key


def test_a_block_around_a_bare_loop_leaves_no_hook() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with DiLoCo(module, optimizer, communicator=communicator, interval=3) as model:
            train(module, optimizer, communicator.rank, range(6))
            model.synchronize()
        found = flat(module)
        assert not module._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        train(module, optimizer, communicator.rank, range(6, 9))
        return found

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_an_exception_in_a_block_ends_the_other_ranks() -> None:
    def rank(communicator: Communicator) -> str:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        try:
            with LocalSGD(module, optimizer, communicator=communicator, interval=2):
                train(module, optimizer, communicator.rank, range(3))
                if communicator.rank:
                    raise KeyError("a bad file")
                train(module, optimizer, communicator.rank, range(3, 9))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    other, own = run_ranks(2, rank)
    assert own == "KeyError: 'a bad file'"
    assert "rank 1" in other
    assert "a bad file" in other


def test_an_exception_ends_an_exchange_under_way() -> None:
    """Rank 1 does not wait for rank 0, which comes to the exchange only when rank 1 has left the block."""
    left = threading.Event()

    def rank(communicator: Communicator) -> None:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        try:
            with LocalSGD(module, optimizer, communicator=communicator, interval=2, delay=1):
                train(module, optimizer, communicator.rank, range(1))
                if communicator.rank == 0:
                    assert left.wait(limits.seconds(20))
                train(module, optimizer, communicator.rank, range(1, 2))
                raise KeyError("a bad file")
        except KeyError:
            left.set()
        except CommunicationError:
            assert communicator.rank == 0

    run_ranks(2, rank, timeout=limits.NEVER)


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_steps_that_a_scaler_leaves_out_do_not_count(kind: Any) -> None:
    """On one rank alone: its round comes a step later than the other's, and means are of as many steps."""

    def rank(communicator: Communicator) -> tuple[int, int]:
        module = Quadratic()
        optimizer = kind(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model = LocalSGD(module, optimizer, communicator=communicator, interval=3)
        taken = 0
        while model.stats().steps < 6:
            optimizer.zero_grad()
            loss = model(1.0, torch.zeros(flat(module).numel()))
            bad = communicator.rank == 1 and taken == 1
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            taken += 1
        model.wait()
        model.close()
        return taken, int(flat(module).isfinite().all())

    assert run_ranks(2, rank) == [(6, 1), (7, 1)]


def test_accumulated_batches_do_not_count() -> None:
    def rank(communicator: Communicator) -> int:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = LocalSGD(module, optimizer, communicator=communicator, interval=2)
        for step in range(8):
            model(batch(communicator.rank, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        steps = model.stats().steps
        model.close()
        return steps

    assert run_ranks(2, rank) == [4, 4]


@every
def test_synchronize_begins_a_round_from_the_mean(case: Case) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = case.make(module, optimizer, communicator)
        train(model, optimizer, communicator.rank, range(6))
        model.wait()
        before = flat(module)
        model.synchronize()
        after = flat(module)
        train(model, optimizer, communicator.rank, range(6, 9))
        model.close()
        return before, after

    everyone = run_ranks(3, rank)
    mean = torch.stack([before.double() for before, _ in everyone]).mean(0)
    for _, after in everyone:
        assert torch.equal(after, everyone[0][1])
        assert torch.allclose(after.double(), mean, atol=1e-6)


def test_outer_nesterov_resumes_and_can_be_left() -> None:
    runs = []
    for part in (False, True):
        module = Odd()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        with OuterNesterov(optimizer, interval=3) as outer:
            train(module, optimizer, 0, range(7))
            state = copy.deepcopy(outer.state_dict())
            if not part:
                train(module, optimizer, 0, range(7, 10))
        if part:
            with OuterNesterov(optimizer, interval=3) as outer:
                outer.load_state_dict(state)
                train(module, optimizer, 0, range(7, 10))
        runs.append(flat(module))
        assert not optimizer._optimizer_step_post_hooks
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (DiLoCo, {"interval": 0}, "interval must be at least 1"),
        (DiLoCo, {"delay": 30}, "delay must be from 0 to interval - 1"),
        (DiLoCo, {"blend": 1.5}, "blend must be from 0 to 1"),
        (DiLoCo, {"fragments": 7}, "fragments must divide interval"),
        (DiLoCo, {"outer_momentum": 1.0}, "outer_momentum from 0 to below 1"),
        (DiLoCo, {"fragments": 5, "delay": 6}, "delay must be from 0"),
        (LocalSGD, {"codec": "nothing"}, "nothing"),
    ],
)
def test_options_that_do_not_fit(kind: Any, options: dict[str, Any], text: str) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        with pytest.raises(ValueError, match=text):
            kind(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **options)

    run_ranks(1, rank)


@every
def test_a_wrapper_goes_back_to_an_earlier_state(case: Case) -> None:
    """One of before the first round too, where there is no momentum yet, at another learning rate."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = case.make(module, optimizer, communicator)
        train(model, optimizer, communicator.rank, range(1))
        states = {1: copy.deepcopy(model.algorithm_state_dict())}
        train(model, optimizer, communicator.rank, range(1, 9))
        states[9] = copy.deepcopy(model.algorithm_state_dict())
        optimizer.param_groups[0]["lr"] = 0.02
        train(model, optimizer, communicator.rank, range(9, 18))
        model.wait()
        expected = flat(module)
        model.load_algorithm_state_dict(states[1])
        train(model, optimizer, communicator.rank, range(1, 9))
        again = model.algorithm_state_dict()["parameters"]
        assert all(torch.equal(values, again[name]) for name, values in states[9]["parameters"].items())
        model.load_algorithm_state_dict(states[9])
        optimizer.param_groups[0]["lr"] = 0.02
        train(model, optimizer, communicator.rank, range(9, 18))
        model.wait()
        assert torch.equal(flat(module), expected)
        model.close()

    run_ranks(2, rank)
