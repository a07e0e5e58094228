"""What is trained with extras, and how."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from bagua_kernels.optim import SGD, AdamW, Extras
from tests.grids import grid, only

F64 = npt.NDArray[np.float64]

# Steps of which each is less than half of the last digit of a bfloat16 between 1/2 and 1, 2^-8.
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 2.0**-11, "weight_decay": 0.01}),
    "sgd": (SGD, {"lr": 2.0**-11}),
    "sgd_momentum": (SGD, {"lr": 2.0**-13, "momentum": 0.75, "weight_decay": 0.01}),
}

SHAPES = [(40, 25), (300,), ()]

DIGIT = 2.0**-8

every_kind = grid(cover=1, kind=only(KINDS, "adamw", "sgd"))


def make(kind: str, params: Any, extras: Extras | None = None, **options: Any) -> Optimizer:
    found, own = KINDS[kind]
    return found(params, **{**own, **options}, extras=extras)


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Multiples of 1/64, beginning near 1."""
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter((1 - torch.randint(1, 8, shape, generator=generator) / 64).to(dtype)) for shape in SHAPES]


def copied(params: Any) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: Optimizer, steps: range) -> None:
    """With gradients between 1/2 and 3/2 that are a function of step and parameter."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params_of(optimizer):
            p.grad = (torch.randint(64, 193, p.shape, generator=generator) / 128).to(p.dtype)
        optimizer.step()


def all_of(params: Any) -> F64:
    return torch.cat([p.detach().double().reshape(-1) for p in params]).numpy()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
