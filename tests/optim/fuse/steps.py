"""Pairs of an optimizer and its fused copy, what they step, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bagua_kernels.optim.fuse.optimizer import fuse_optimizer

SHAPES = [(3,), (17, 5), (64,), (31,), (2, 3, 3, 3), (1,), (130, 7), (40,)]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def give_gradients(step: int, *several: list[torch.Tensor], skip: tuple[int, ...] = ()) -> None:
    """Makes new gradients, equal in all lists."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, same in enumerate(zip(*several, strict=True)):
        gradient = torch.randn(same[0].shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 4 - 2)
        for p in same:
            p.grad = None if i in skip else gradient.to(p.dtype)


def pair(make: Callable[..., torch.optim.Optimizer], **arguments: object):
    """An optimizer and its fused equal, each with its parameters."""
    left, right = parameters(**arguments), parameters(**arguments)
    return left, make(left), right, fuse_optimizer(make(right))


def flat(optimizer: torch.optim.Optimizer) -> int:
    """How many flat tensors the last step had."""
    return len(optimizer._flat_step.runs)


def assert_same(plain: torch.optim.Optimizer, fused: torch.optim.Optimizer) -> None:
    """Parameters, state and options are equal in every bit, key and type."""
    for group, other in zip(plain.param_groups, fused.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert p.stride() == q.stride()
            torch.testing.assert_close(q, p, rtol=0, atol=0, equal_nan=True)
    left, right = plain.state_dict(), fused.state_dict()
    assert repr(left["param_groups"]) == repr(right["param_groups"])
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        counterpart = right["state"][index]
        if not isinstance(state, dict):
            assert state == counterpart
            continue
        assert state.keys() == counterpart.keys()
        for key, value in state.items():
            other = counterpart[key]
            assert type(value) is type(other)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert value.shape == other.shape
                torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert value == other


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Counting(Lamb):
    """Numbers instead of tensors, state made anew each step, counters of the group and of the optimizer."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.calls = 0
        self.lookup = {id(p): p for p in self.param_groups[0]["params"]}

    def step(self, closure=None):
        self.calls += 1
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.state["total"] = self.calls
        super().step()

    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        state["ema"] = state["ema"] * 0.9 + p.grad if "ema" in state else p.grad.clone()
        if state["step"] == 3:
            state["late"] = torch.ones(1, dtype=torch.int32)
            state["wide"] = p.double()
        if state["step"] == 5:
            del state["late"]
        p.sub_(state["ema"] / state["step"] * group["lr"])
