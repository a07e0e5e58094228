"""Optimizers made of rules, and one of them in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagua_kernels.optim import rule_optimizer
from bagua_kernels.rules import vocabulary as tl

F64 = npt.NDArray[np.float64]


def shrunk(x, rate):
    return x * rate


def heavy(p, g, m, lr, momentum, correction):
    """Momentum whose bias is corrected."""
    m = tl.fma(m, momentum, g)
    return p - m * lr * correction, m


def correct(options: Any, step: Any) -> dict[str, Any]:
    beta = options["momentum"]
    return {"correction": (1 - beta) / (1 - beta**step)}


Heavy = rule_optimizer("Heavy", heavy, state={"velocity": 0.0}, defaults={"lr": 0.1, "momentum": 0.9}, derive=correct)


class HeavyChild(Heavy):
    """A subclass with a constructor of its own."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate)


def halving(p, g, size, last, step, lr):
    """Steps that shrink with their number and on a state that begins at 1; nothing in it needs a rounding."""
    size = shrunk(size, 0.5)
    return p - g * size * lr * step, size, g + last


Halving = rule_optimizer("Halving", halving, state={"size": 1.0, "last": -2.0}, defaults={"lr": 1.0})


def plain(p, g, lr):
    return p - g * lr


Plain = rule_optimizer("Plain", plain, state={}, defaults={"lr": 0.5})


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in ((7, 5), (130,), ())
    ]


def gradient(p: Tensor, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        index = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(p, step, index)
                index += 1
        optimizer.step()


def one(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with a gradient of ones."""
    p = nn.Parameter(torch.full((3,), value, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


class HeavyOracle:
    """What `Heavy` does to a parameter, in float64."""

    def __init__(self, p: Tensor, index: int, lr: float = 0.1, momentum: float = 0.9, maximize: bool = False) -> None:
        self.like, self.index = p.detach().clone(), index
        self.p = self.like.double().numpy().copy()
        self.m: F64 = np.zeros_like(self.p)
        self.lr, self.momentum, self.sign = lr, momentum, -1.0 if maximize else 1.0

    def train(self, steps: range) -> None:
        for t in steps:
            self.m = self.momentum * self.m + self.sign * gradient(self.like, t, self.index).double().numpy()
            self.p = self.p - self.lr * self.m * (1 - self.momentum) / (1 - self.momentum**t)

    def check(self, p: Tensor, state: dict[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
        for got, wanted in ((p, self.p), (state["velocity"], self.m)):
            np.testing.assert_allclose(got.detach().double().numpy(), wanted, rtol=rtol, atol=atol)
