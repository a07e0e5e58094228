"""Configurations of every optimizer, which the tests of optimizers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Table = dict[str, dict[str, Any]]


def has_exact_roots() -> bool:
    """Whether torch rounds square roots correctly: those it takes from MKL are a unit away on some makers' processors."""
    values = np.random.default_rng(0).random(1 << 12, np.float32)
    return np.array_equal(torch.from_numpy(values).sqrt().numpy(), np.sqrt(values))


# How much wider than a few roundings apart float32 may be from torch's.
SLACK = 1.0 if has_exact_roots() else 4.0


@dataclass(frozen=True)
class Case:
    """One configuration of one optimizer.

    Attributes:
        optimizer: Name of the class.
        name: What is special about it.
        arguments: Keyword arguments of the constructor, always with `lr`; read them through `options()`.
        in_torch: Whether `torch.optim` has the class too; it takes the same arguments then.
        rounded: What one step may give in other bits of float32 than torch does, "parameter" or names of states: a root
            enters there, whose rounding torch leaves open, or a scalar that torch computes in float32.
    """

    optimizer: str
    name: str
    arguments: dict[str, Any]
    in_torch: bool = True
    rounded: tuple[str, ...] = ("parameter",)

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.name}"

    @property
    def exact(self) -> bool:
        """Whether all bits must be torch's: every one of its operations can be had with the same rounding."""
        return not self.rounded

    @property
    def units(self) -> float:
        """How many units in the last place the rounded may be away: torch computes with tensors in their own float32."""
        values = [
            part for value in self.arguments.values() for part in (value if isinstance(value, tuple) else (value,))
        ]
        return SLACK * (8.0 if any(isinstance(value, torch.Tensor) for value in values) else 2.0)

    def options(self) -> dict[str, Any]:
        """Returns arguments of one's own, since a scheduler writes to a tensor; floats in tensors get the default dtype."""
        return {name: own(value) for name, value in self.arguments.items()}


def own(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(own(part) for part in value)
    return value.to(torch.get_default_dtype(), copy=True) if isinstance(value, torch.Tensor) else value


def build(
    optimizer: str,
    table: Table,
    rounded: tuple[str, ...] = ("parameter",),
    rounded_with_tensor: tuple[str, ...] | None = None,
    in_torch: bool = True,
) -> tuple[Case, ...]:
    """Returns the cases of one optimizer, and one more with the learning rate of the first as a tensor."""
    first = next(iter(table.values()))
    with_tensor = {**first, "lr": torch.tensor(first["lr"])}
    rounded_with_tensor = rounded if rounded_with_tensor is None else rounded_with_tensor
    return (
        *(Case(optimizer, name, arguments, in_torch, rounded) for name, arguments in table.items()),
        Case(optimizer, "tensor_lr", with_tensor, in_torch, rounded_with_tensor),
    )


SGD: Table = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.01, "momentum": 0.9},
    "dampening": {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"lr": 0.01, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "weight_decay": {"lr": 0.05, "weight_decay": 0.1},
}
# A first beta below 0.5 takes the other one of the two formulas that torch has for an interpolation.
ADAM: Table = {
    "default": {"lr": 0.01},
    "weight_decay": {"lr": 0.01, "weight_decay": 0.1},
    "amsgrad": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01, "betas": (0.9, 0.9)},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
    "betas": {"lr": 0.01, "betas": (0.4, 0.95), "eps": 1e-3},
    "tensor_betas": {"lr": 0.01, "betas": (torch.tensor(0.8), torch.tensor(0.99))},
}
DECOUPLED: Table = {"decoupled": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}}
MOMENTS: Table = {
    "default": {"lr": 0.01},
    "weight_decay": {"lr": 0.01, "weight_decay": 0.1},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
    "betas": {"lr": 0.01, "betas": (0.4, 0.9), "eps": 1e-3},
}
ADAGRAD: Table = {
    "default": {"lr": 0.05},
    "lr_decay": {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1},
    "initial_accumulator_value": {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
    "maximize": {"lr": 0.05, "maximize": True, "weight_decay": 0.1},
}
ADADELTA: Table = {
    "default": {"lr": 1.0},
    "rho": {"lr": 0.5, "rho": 0.7, "eps": 1e-4},
    "weight_decay": {"lr": 2.0, "weight_decay": 0.1},
    "maximize": {"lr": 1.0, "maximize": True, "weight_decay": 0.01},
}
RMSPROP: Table = {
    "default": {"lr": 0.01},
    "momentum": {"lr": 0.003, "momentum": 0.9},
    "centered": {"lr": 0.01, "centered": True, "weight_decay": 0.1},
    "centered_momentum": {"lr": 0.003, "centered": True, "momentum": 0.8, "alpha": 0.9, "eps": 1e-3},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
}
RPROP: Table = {
    "default": {"lr": 0.01},
    "etas": {"lr": 0.01, "etas": (0.3, 1.5), "step_sizes": (1e-3, 0.02)},
    "maximize": {"lr": 0.01, "maximize": True},
}
ASGD: Table = {
    "default": {"lr": 0.05},
    "averaging": {"lr": 0.1, "lambd": 0.01, "alpha": 0.6, "t0": 3.0},
    "maximize": {"lr": 0.05, "lambd": 0.1, "t0": 5.0, "maximize": True, "weight_decay": 0.1},
}
LION: Table = {
    "default": {"lr": 0.01},
    "weight_decay": {"lr": 0.01, "weight_decay": 0.1, "betas": (0.95, 0.98)},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
}
LARS: Table = {
    "default": {"lr": 1.0},
    "plain": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.1},
    "dampening": {"lr": 2.0, "momentum": 0.9, "dampening": 0.3, "eps": 1e-3},
    "nesterov": {"lr": 1.0, "momentum": 0.8, "nesterov": True, "trust_coefficient": 0.01},
    "maximize": {"lr": 1.0, "maximize": True, "weight_decay": 0.1},
}

CASES: tuple[Case, ...] = (
    *build("SGD", SGD, rounded=()),
    *build("Adam", {**ADAM, **DECOUPLED}),
    *build("AdamW", ADAM),
    *build(
        "NAdam",
        {**MOMENTS, **DECOUPLED, "momentum_decay": {"lr": 0.01, "momentum_decay": 0.1}},
        rounded=("parameter", "mu_product"),
    ),
    *build("RAdam", {**MOMENTS, **DECOUPLED}),
    *build("Adamax", MOMENTS, rounded=(), rounded_with_tensor=("parameter",)),
    *build("Adagrad", ADAGRAD),
    *build("Adadelta", ADADELTA, rounded=("parameter", "acc_delta")),
    *build("RMSprop", RMSPROP, rounded=("parameter", "momentum_buffer")),
    *build("Rprop", RPROP, rounded=()),
    *build("ASGD", ASGD, rounded=(), rounded_with_tensor=("parameter", "ax", "eta")),
    *build("Lion", LION, in_torch=False),
    *build("LAMB", MOMENTS, in_torch=False),
    *build("LARS", LARS, in_torch=False),
)
TORCH_CASES = tuple(case for case in CASES if case.in_torch)
