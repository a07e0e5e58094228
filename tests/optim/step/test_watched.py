"""Steps that a gradient scaler leaves out, as hooks and replaced methods see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import algorithms, optim
from bagua_kernels.comm import run_ranks

Watch = Callable[[torch.optim.Optimizer, list[int]], None]


def post_hook(optimizer: torch.optim.Optimizer, seen: list[int]) -> None:
    optimizer.register_step_post_hook(lambda *_: seen.append(1))


def pre_hook(optimizer: torch.optim.Optimizer, seen: list[int]) -> None:
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))


def replaced(optimizer: torch.optim.Optimizer, seen: list[int]) -> None:
    original = optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return original(*args, **options)

    optimizer.step = step  # type: ignore[method-assign]


def scheduled(optimizer: torch.optim.Optimizer, seen: list[int]) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    post_hook(optimizer, seen)


def trained(module: Any, watch: Watch | None, **options: Any) -> tuple[int, torch.Tensor]:
    """How often it was seen in three steps, the second of which is left out, and the parameters."""
    p = nn.Parameter(torch.ones(3))
    optimizer, seen = module.AdamW([p], lr=0.1, **options), list[int]()
    if watch is not None:
        watch(optimizer, seen)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(torch.zeros(1))
        p.grad = torch.full((3,), float("inf") if step == 1 else 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return len(seen), p.detach()


@pytest.mark.parametrize("watch", [post_hook, pre_hook, replaced, scheduled])
def test_steps_left_out_are_seen_as_with_pytorch(watch: Watch) -> None:
    seen, values = trained(optim, watch)
    expected, wanted = trained(torch.optim, watch)
    assert seen == expected == 2
    torch.testing.assert_close(values, wanted)
    assert torch.equal(values, trained(optim, None)[1])


def test_gradients_are_only_read_while_nobody_watches() -> None:
    """A schedule replaces `step` too."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([p], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    p.grad = torch.full((3,), 4.0)
    scaler.step(optimizer)
    assert p.grad.tolist() == [4.0] * 3
    assert torch.equal(p.detach(), torch.full((3,), 1.0) - 0.1)


def test_fused_counts_all_as_pytorch_does() -> None:
    assert trained(optim, post_hook, fused=True)[0] == trained(torch.optim, post_hook, fused=True)[0] == 3


def test_parameters_in_float16_can_be_watched() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer, seen = optim.SGD([p], lr=0.5), list[int]()
    post_hook(optimizer, seen)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    p.grad = torch.full((3,), 4.0, dtype=torch.float16)
    scaler.step(optimizer)
    assert (p.tolist(), len(seen)) == ([0.5] * 3, 1)


def test_rounds_are_counted_where_one_rank_leaves_out_a_step() -> None:
    """Algorithms on parameters count all steps, whatever else watches."""

    def rank(c: Any) -> int:
        module = nn.Linear(2, 2)
        optimizer, seen = optim.SGD(module.parameters(), lr=0.1), list[int]()
        post_hook(optimizer, seen)
        with algorithms.Decentralized(module, optimizer, communicator=c) as model:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(3):
                factor = float("inf") if step == 1 == c.rank else 1.0
                scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return model.stats().steps

    assert run_ranks(2, rank) == [3, 3]
