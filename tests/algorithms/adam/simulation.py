"""QAdam and 1-bit Adam in NumPy, and models whose gradients are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.adam.onebit_adam import OneBitAdam
from bagua_kernels.algorithms.adam.qadam import QAdam
from tests.grids import grid
from tests.oracles import minmax_uint8

Kind = Callable[..., MomentumAllReduce]

OneBit = partial(OneBitAdam, exact=(), min_numel=0)  # the models here are small

KINDS: dict[str, Kind] = {"qadam": QAdam, "onebit_adam": OneBit}

both = grid(cover=1, kind=KINDS)

# "frozen" is for trainings that began with it, and warns.
may_be_frozen = pytest.mark.filterwarnings("ignore:v_correction='frozen' is only for trainings:DeprecationWarning")
CORRECTIONS = {"default": {}, "none": {"v_correction": "none"}, "frozen": {"v_correction": "frozen"}}

F64 = np.ndarray[Any, np.dtype[np.float64]]

# With v's usual decay, five steps would leave next to nothing of it without correction, and steps grow by `limit`.
BETAS = (0.9, 0.9)


class Given(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, int(np.prod(shape))).view(shape)))

    def forward(self, **gradients: torch.Tensor) -> torch.Tensor:
        return torch.stack([(getattr(self, name) * g).sum() for name, g in gradients.items()]).sum()


def draw(step: int, rank: int, shape: tuple[int, ...], name: str = "w") -> torch.Tensor:
    """A gradient: common to the ranks in part, and of other sizes at other places."""
    common, own = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7919 * step + 31 * len(name) + add))
        for add in (0, rank + 1)
    )
    return (common + own) * torch.logspace(-2, 0, int(np.prod(shape))).view(shape)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class SignCode:
    """Both passes of one bit with residuals, in float64, on vectors of whole blocks."""

    def __init__(self, ranks: int, n: int) -> None:
        self.worker = np.zeros((ranks, n))
        self.owner = np.zeros(n)

    @staticmethod
    def code(x: F64) -> F64:
        blocks = x.reshape(-1, 256)
        return (np.abs(blocks).mean(1, keepdims=True) * np.where(blocks < 0, -1.0, 1.0)).reshape(-1)

    def mean(self, vectors: F64) -> F64:
        total = vectors + self.worker
        sent = np.stack([self.code(x) for x in total])
        self.worker = total - sent
        mean = sent.mean(0) + self.owner
        result = self.code(mean)
        self.owner = mean - result
        return result


class ByteCode:
    """Both passes of a byte, bit by bit as the wire format says."""

    def __init__(self, ranks: int, n: int) -> None:
        self.n = n

    def code(self, x: F64) -> F64:
        return minmax_uint8.decode(minmax_uint8.encode(x.astype(np.float32), 256), self.n, 256).astype(np.float64)

    def mean(self, vectors: F64) -> F64:
        return self.code(np.stack([self.code(x) for x in vectors]).mean(0))


CODES: dict[Kind, Any] = {QAdam: ByteCode, OneBit: SignCode}


def simulate(
    code: Any,
    gradients: F64,
    start: F64,
    freeze: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    exact: bool = False,
    v_correction: str = "continued",
) -> list[F64]:
    """1-bit Adam for given gradients (steps, ranks, elements): the parameters after each step.

    Up to the freeze Adam of Kingma and Ba. After it v is no longer corrected in the paper ("none"), as at the freeze
    ("frozen"), or as Adam's would be ("continued").
    """
    x, m, v, found = start.astype(np.float64), np.zeros(start.size), np.zeros(start.size), []
    correction = 1.0
    for t, local in enumerate(gradients.astype(np.float64), 1):
        if t <= freeze:
            g = local.mean(0)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            correction = 1 - betas[1] ** t
        else:
            moved = betas[0] * m + (1 - betas[0]) * local
            m = (moved.mean(0) if exact else code.mean(moved)) * (v > 0)
            correction = {"none": 1.0, "frozen": 1 - betas[1] ** freeze, "continued": 1 - betas[1] ** t}[v_correction]
        x = x * (1 - lr * decay)
        x = x - lr * m / (1 - betas[0] ** t) / (np.sqrt(v / correction) + eps)
        found.append(x)
    return found


def drawn(steps: int, ranks: int, shape: tuple[int, ...], name: str = "w") -> F64:
    return np.stack([[draw(s, r, shape, name).numpy().reshape(-1) for r in range(ranks)] for s in range(steps)])


def assert_close(ours: torch.Tensor, expected: F64, what: object) -> None:
    """Equal but for float32, and for few elements that it rounds to another level or sign."""
    error = np.abs(ours.numpy().reshape(-1) - expected)
    assert np.quantile(error, 0.995) < 2e-6, what
    assert error.max() < 0.02, what
