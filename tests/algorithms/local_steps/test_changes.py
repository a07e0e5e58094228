"""What changes in the middle of a run with local steps: ranks, learning rates, algorithms, and what is trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import DiLoCo, GradientAllReduce, LocalSGD, SlowMo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests.algorithms import parts
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.common import Case, Tensors, cases, step
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid


@pytest.mark.parametrize(
    "case",
    [Case(LocalSGD, {"codec": "sign", "exact": (), "min_numel": 0}), Case(SparseLoCo, {"codec": ChunkedTopK(8, 64)})],
    ids=["local_sgd, sign", "sparse_loco"],
)
def test_a_run_of_one_rank_goes_on_with_two(case: Case) -> None:
    """One rank alone meets nobody, and has no outer parameters: two ranks begin with its parameters."""

    def alone(communicator: Communicator) -> tuple[Any, torch.Tensor]:
        module = Tensors((64, 64), (3,))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with case.make(module, optimizer, communicator) as model:
            for number in range(4):
                step(module, optimizer, 0, number)
            state = copy.deepcopy(model.algorithm_state_dict())
        return state, flat(module)

    ((state, before),) = run_ranks(1, alone)

    def both(communicator: Communicator) -> torch.Tensor:
        module = Tensors((64, 64), (3,))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        with case.make(module, optimizer, communicator, interval=1) as model:
            model.load_algorithm_state_dict([state])
            optimizer.param_groups[0]["lr"] = 0.0
            assert torch.equal(flat(module), before)
            step(module, optimizer, 0, 9)
            model.wait()
        return flat(module)

    for after in run_ranks(2, both):
        assert torch.equal(after, before)


@grid(case=cases("local_sgd", "slow_mo", "sparse_loco, delayed"), ranks__others=[(3, 2), (2, 3)], cover=1)
def test_a_model_in_float64_goes_on_with_another_number_of_ranks(case: Case, ranks: int, others: int) -> None:
    """From the mean, which is not rounded to float32."""

    def save(communicator: Communicator) -> tuple[Any, torch.Tensor, torch.Tensor]:
        module = Odd().double()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        with case.make(module, optimizer, communicator) as model:
            for number in range(5):
                optimizer.zero_grad()
                model(batch(communicator.rank, number).double()).square().mean().backward()
                optimizer.step()
            state = copy.deepcopy(model.algorithm_state_dict())
            starts = torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])
            return state, flat(module), starts

    saved = run_ranks(ranks, save)
    mean = torch.stack([x for _, x, _ in saved]).mean(0)

    def load(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = Odd().double()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        with case.make(module, optimizer, communicator) as model:
            model.load_algorithm_state_dict([state for state, *_ in saved])
            return flat(module), torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])

    for parameters, starts in run_ranks(others, load):
        assert parameters.dtype == torch.float64
        assert torch.allclose(parameters, mean, rtol=1e-14, atol=1e-15)
        assert torch.allclose(starts, saved[0][2], rtol=1e-14, atol=1e-15)


def learning_rates(communicator: Communicator, rates: Any) -> Any:
    """Trains with slow momentum, by learning rates of a rank and a step; returns the outer parameters and the state."""
    module = Tensors((16, 16))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with SlowMo(module, optimizer, communicator=communicator, interval=2, slow_momentum=0.9) as model:
        for number in range(8):
            optimizer.param_groups[0]["lr"] = rates(communicator.rank, model.stats().steps)
            step(module, optimizer, communicator.rank, number)
        model.wait()
        return torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets]), copy.deepcopy(
            model.algorithm_state_dict()
        )


def test_learning_rates_of_ranks_may_differ_with_slow_momentum() -> None:
    """As they do where a scaler has left out steps of one rank, whose schedule goes on: outer parameters stay the same."""

    def rates(rank: int, number: int) -> float:
        return 0.1 / (1 + number + 0.5 * rank)

    (first, _), (second, _) = run_ranks(2, learning_rates, rates)
    assert torch.equal(first, second)


@grid(cover=1, ranks=[2, 3])
def test_slow_momentum_keeps_its_learning_rate(ranks: int) -> None:
    """In a checkpoint, for any number of ranks. It is in units of parameters, and the learning rate of a round may be another."""
    before = run_ranks(2, learning_rates, lambda rank, number: 0.1)
    states = [state for _, state in before]

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Tensors((16, 16))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SlowMo(module, optimizer, communicator=communicator, interval=2, slow_momentum=0.9) as model:
            model.load_algorithm_state_dict(states[communicator.rank] if ranks == 2 else states)
            # Without gradients the momentum alone moves parameters: by a tenth of what it would at the old learning rate.
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
            optimizer.step()
            model.wait()
            return torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])

    momentum = states[0]["vectors"]["slow_momentum"]["p0"]
    for after in run_ranks(ranks, rank):
        assert torch.allclose(after, before[0][0] - 0.09 * momentum, atol=1e-6)


@grid(cover=1, kind=[torch.optim.SGD, torch.optim.AdamW], average=[False, True])
def test_replicas_stay_equal_after_a_switch_to_gradients(kind: Any, average: bool) -> None:
    """Though the optimizer's states were each rank's own until then, and nobody passes the optimizer again."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Odd()
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(module.parameters(), lr=0.01, **options)
        model: Any = DiLoCo(module, optimizer, communicator=communicator, interval=4, average_states=average)
        for number in range(12):
            if number == 6:
                model = model.switch_to(GradientAllReduce)
            optimizer.zero_grad()
            model(batch(communicator.rank, number)).square().mean().backward()
            optimizer.step()
        model.close()
        return flat(module)

    first, *others = run_ranks(3, rank)
    assert all(torch.equal(first, other) for other in others)


@grid(
    cover=1,
    delay=[0, 2],
    case={
        "local_sgd": Case(LocalSGD),
        "diloco": Case(DiLoCo, {"outer_momentum": 0.0}),
        "slow_mo": Case(SlowMo, {"slow_momentum": 0.0}),
    },
)
def test_a_parameter_that_is_frozen_in_the_middle_does_not_change(case: Case, delay: int) -> None:
    """Its pseudo-gradient is zero. An outer momentum is not, and goes on."""

    def rank(communicator: Communicator) -> None:
        module = Tensors((32, 32), (32, 32))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with case.make(module, optimizer, communicator, interval=4, delay=delay) as model:
            for number in range(8 + 3):
                step(module, optimizer, communicator.rank, number)
            model.synchronize()
            module.p1.requires_grad_(False)
            module.p1.grad = None
            frozen, other = module.p1.detach().clone(), module.p0.detach().clone()
            for _ in range(8):
                module.p0.grad = torch.full_like(module.p0, 0.1 * (1 + communicator.rank))
                optimizer.step()
            model.wait()
            assert torch.equal(module.p1, frozen)
            assert not torch.equal(module.p0, other)

    run_ranks(2, rank)


@grid(case=cases("diloco", "diloco, sign", "sparse_loco"), last=[True, False], ranks=[2, 3], cover=1)
def test_a_checkpoint_fits_another_memory_format(case: Case, last: bool, ranks: int) -> None:
    """What is kept of a parameter is saved in the order of its indices, not in that of its memory."""

    def made(channels_last: bool) -> Tensors:
        module = Tensors((6, 5, 3, 4))
        return module.to(memory_format=torch.channels_last) if channels_last else module

    def rank(communicator: Communicator, saved: Any) -> Any:
        module = made(last if saved is None else not last)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with case.make(module, optimizer, communicator) as model:
            if saved is None:
                for number in range(6):
                    step(module, optimizer, communicator.rank, number)
            else:
                model.load_algorithm_state_dict(saved[communicator.rank] if ranks == 2 else saved)
            state = copy.deepcopy(model.algorithm_state_dict())
            starts = torch.cat([bucket_view.flatten() for bucket_view in outer_parameters(model)])
        return state, starts

    before = run_ranks(2, rank, None)
    for state, starts in run_ranks(ranks, rank, [state for state, _ in before]):
        assert torch.equal(starts, before[0][1])
        for key in state["vectors"].keys() - {"worker", "residual"}:
            assert torch.equal(state["vectors"][key]["p0"], before[0][0]["vectors"][key]["p0"]), key


def outer_parameters(model: Any) -> list[torch.Tensor]:
    """The outer parameters in the shapes of the parameters."""
    found = []
    for bucket in model.local.flat.buckets:
        start = parts.start(model, bucket)
        for view, span in zip(bucket.views, bucket.spans, strict=True):
            found.append(start.as_strided(view.shape, view.stride(), span.start))
    return found
