"""Counters that another optimizer also counts: one of another process in shared memory, or one that has the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_kernels import optim
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.watch.sweep import FEWEST
from tests.grids import grid

State = dict[str, Tensor]
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.5},
    "ASGD": {"lr": 0.1, "t0": 2},
}
every_name = grid(cover=1, name=list(OPTIONS), count=[3, FEWEST + 6])


def optimizer(library: Any, name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return getattr(library, name)(params, **OPTIONS[name], foreach=False)


def another_process(state: State) -> State:
    """Other tensors of the same memory, which is what a process sees that has been given shared ones."""
    return {key: value.view_as(value) for key, value in state.items()}


def in_turn(library: Any, name: str, count: int, see: Callable[[State], State], *, shared: bool) -> list[Any]:
    """Parameters and counters after two optimizers have taken turns; each leaves another parameter out of its first step."""
    params = [nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(count)]
    first = optimizer(library, name, params)
    for p in params:
        p.grad = torch.zeros_like(p)
    first.step()
    for p in params:
        # Tensors of their own, as a user makes them or a checkpoint has them.
        made = {key: value.clone() for key, value in first.state[p].items()}
        first.state[p] = {key: value.share_memory_() for key, value in made.items()} if shared else made
    second = optimizer(library, name, params)
    for p in params:
        second.state[p] = see(first.state[p])
    counters = [value for p in params for value in first.state[p].values() if not value.dim()]
    for step in range(6):
        for index, p in enumerate(params):
            p.grad = None if index == step else torch.full_like(p, 1.0 + step)
        (first, second)[step % 2].step()
    return [p.detach() for p in params] + counters


@every_name
def test_processes_share_counters(name: str, count: int) -> None:
    """In one process here, with tensors of their own over the same memory."""
    mine, other = (in_turn(lib, name, count, another_process, shared=True) for lib in (optim, torch.optim))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@every_name
def test_optimizers_share_the_same_tensors(name: str, count: int) -> None:
    mine, other = (in_turn(lib, name, count, dict, shared=False) for lib in (optim, torch.optim))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_counting_with_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with counters on a GPU."""
    monkeypatch.setattr(Launch, "on_device", property(lambda launch: bool(launch.counters)))
    mine, other = (in_turn(lib, "Adam", 3, another_process, shared=True) for lib in (optim, torch.optim))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_a_counter_keeps_its_object_and_shape(shared: bool) -> None:
    p = nn.Parameter(torch.ones(3))
    ours = optim.Adam([p])
    step = torch.zeros(1)
    state = {"step": step.share_memory_() if shared else step}
    ours.state[p] = state | {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    for _ in range(2):
        p.grad = torch.ones(3)
        ours.step()
    assert ours.state[p]["step"] is step
    assert step.tolist() == [2.0]


def test_one_counter_of_two_parameters_becomes_two() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours = optim.Adam(params)
    step = torch.zeros(())
    for p in params:
        p.grad = torch.ones(3)
        ours.state[p] = {"step": step, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    ours.step()
    assert [ours.state[p]["step"].item() for p in params] == [1.0, 1.0]
