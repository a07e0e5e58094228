"""Moments of optimizers that are averaged less often than parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import DiLoCo, LocalSGD
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import batch, fill

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "own AdamW": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "own Lion": lambda p: optim.Lion(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
FIRST = {"exp_avg", "momentum_buffer"}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    found.setdefault(name, []).append(value.clone())
    return found


def run(size: int, name: str, steps: int, **options: Any) -> list[list[dict[str, list[torch.Tensor]]]]:
    """Returns each rank's moments after each of some steps, rounds put in place."""

    def rank(communicator: Communicator) -> list[dict[str, list[torch.Tensor]]]:
        module = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        fill(module)
        optimizer = OPTIMIZERS[name](module.parameters())
        model = LocalSGD(module, optimizer, communicator=communicator, **options)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            model.wait()
            seen.append(moments(optimizer))
        model.close()
        return seen

    return run_ranks(size, rank)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_equal_when_they_have_been_averaged(name: str) -> None:
    """Rounds after every second step; first moments in each second round, the others in each third."""
    everyone = run(3, name, 12, interval=2, sync_state=(2, 3))
    for step in range(12):
        round_ends, number = (step + 1) % 2 == 0, (step + 1) // 2
        for key in everyone[0][step]:
            every = 2 if key in FIRST else 3
            equal = all(
                torch.equal(a, b)
                for seen in everyone[1:]
                for a, b in zip(everyone[0][step][key], seen[step][key], strict=True)
            )
            assert equal == (round_ends and number % every == 0), (step, key)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("call", ["join", "synchronize", "close"])
def test_a_rank_that_is_through_at_the_end_of_a_round_averages_moments_with_the_others(call: str, delay: int) -> None:
    """They wait for that before their next pass, while it waits for them at a call."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = nn.Linear(7, 3)
        fill(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
        options: dict[str, Any] = {"interval": 4, "sync_state": (1, 1), "delay": delay}
        with LocalSGD(module, optimizer, communicator=communicator, **options) as model:
            with model.join() if call == "join" else contextlib.nullcontext():
                for step in range(16 if communicator.rank == 0 else 8):
                    optimizer.zero_grad()
                    model(batch(communicator.rank, step)).square().mean().backward()
                    optimizer.step()
            if call == "synchronize":
                model.synchronize()
        return module.weight.detach().clone()

    first, second = run_ranks(2, rank)
    assert call != "synchronize" or torch.equal(first, second)


def test_a_mean_is_that_of_the_ranks() -> None:
    """With an interval of one step the moments before the mean follow from those of the step before, and the gradient."""
    beta = 0.9

    def rank(communicator: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        module = nn.Linear(7, 3)
        fill(module)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(beta, 0.99))
        model = LocalSGD(module, optimizer, interval=1, communicator=communicator, sync_state=(1, 1))
        seen = []
        before = torch.zeros(3, 7)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            own = beta * before + (1 - beta) * module.weight.grad
            optimizer.step()
            model.wait()
            before = optimizer.state[module.weight]["exp_avg"].clone()
            seen.append((own, before))
        model.close()
        return seen

    for steps in zip(*run_ranks(4, rank), strict=True):
        mean = torch.stack([own for own, _ in steps]).double().mean(0)
        for _, averaged in steps:
            assert torch.allclose(averaged.double(), mean, rtol=1e-5, atol=1e-9)


def test_without_the_option_moments_stay_local() -> None:
    one, other = run(2, "AdamW", 4, interval=1)
    assert not torch.equal(one[-1]["exp_avg"][0], other[-1]["exp_avg"][0])


def test_a_parameter_that_one_rank_never_uses_keeps_its_moments() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])
        fill(module)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        model = LocalSGD(module, optimizer, interval=1, communicator=communicator, sync_state=(1, 1))
        for step in range(2):
            optimizer.zero_grad()
            used = module[: 1 + (communicator.rank == 0)]
            sum(layer(batch(communicator.rank, step)).square().mean() for layer in used).backward()
            optimizer.step()
            model.wait()
        model.close()
        return optimizer.state[module[0].weight]["exp_avg"]

    one, other = run_ranks(2, rank)
    assert torch.equal(one, other)


def test_fragments_count_whole_models() -> None:
    """With two fragments each second round is the end of an exchange of all parameters."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 3))
        fill(module)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        model = DiLoCo(module, optimizer, interval=2, fragments=2, communicator=communicator, sync_state=(1, 2))
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            model.wait()
            seen.append(optimizer.state[module[0].weight]["exp_avg"].clone())
        model.close()
        return seen

    one, other = run_ranks(2, rank)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [False, True, False, True]


@pytest.mark.parametrize("wrong", [(3,), (0, 6), (3, 0)])
def test_numbers_that_do_not_fit(wrong: Any) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="sync_state must be two numbers of rounds"):
        LocalSGD(module, torch.optim.SGD(module.parameters(), lr=0.1), sync_state=wrong)
