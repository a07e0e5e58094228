"""Optimizers, beside a copy and beside PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.optimizers import ADAM, SGD, ElementwiseRule
from bench.workloads.rows import Run, Workload, backend_rows, copy_row, gradient

KINDS = ("fused", "foreach")
STEP = 10
LR, MOMENTUM, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True)
class Optimizer:
    """An optimizer here and in PyTorch.

    Attributes:
        rule: ours.
        scalars: of the rule.
        theirs: (parameters, which of PyTorch's implementations) -> its optimizer.
    """

    rule: ElementwiseRule
    scalars: tuple[float, ...]
    theirs: Callable[[list[torch.Tensor], str], torch.optim.Optimizer]

    def moved(self, n: int, gradients: int) -> int:
        """What a step reads and writes, with `gradients` bytes for the gradient."""
        return 4 * n * (self.rule.arrays - 1 + len(self.rule.writes)) + gradients

    def state(self, n: int, device: torch.device) -> list[torch.Tensor]:
        """The rule's arrays but the gradient, which is the second."""
        return [torch.zeros(n, device=device) for _ in range(self.rule.arrays - 1)]

    def step(self, state: list[torch.Tensor], gradients: torch.Tensor) -> None:
        elementwise.apply(self.rule, (state[0], gradients, *state[1:]), self.scalars)


def adamw_scalars(step: int) -> tuple[float, ...]:
    bias1, bias2 = 1 - BETA1**step, 1 - BETA2**step
    return (0.0, 1 - LR * DECAY, 1 - BETA1, BETA2, 1 - BETA2, EPS, LR / bias1, bias2**0.5)


OPTIMIZERS = {
    "SGD": Optimizer(
        SGD,
        (LR, MOMENTUM, 1.0, DECAY, 0.0),
        lambda p, kind: torch.optim.SGD(p, LR, MOMENTUM, weight_decay=DECAY, **{kind: True}),
    ),
    "AdamW": Optimizer(
        ADAM, adamw_scalars(STEP), lambda p, kind: torch.optim.AdamW(p, LR, (BETA1, BETA2), EPS, DECAY, **{kind: True})
    ),
}


def optimizer_group(name: str, n: int, device: torch.device) -> list[Workload]:
    optimizer = OPTIMIZERS[name]
    moved = optimizer.moved(n, 4 * n)

    def ours() -> Run:
        gradients = gradient(n, device)
        state = optimizer.state(n, device)
        return lambda: optimizer.step(state, gradients)

    def theirs(kind: str) -> Run:
        p = torch.zeros(n, device=device, requires_grad=True)
        p.grad = gradient(n, device)
        return optimizer.theirs([p], kind).step

    rows = [copy_row(name, n, device), *backend_rows(name, "", moved, ours, device)]
    rows += [Workload(name, "", f"torch {kind}", moved, functools.partial(theirs, kind)) for kind in KINDS]
    return rows


def groups(n: int, device: torch.device) -> list[list[Workload]]:
    return [optimizer_group("AdamW", n, device)]
