"""One of our optimizers and PyTorch's of the same name, side by side on the same numbers."""

from __future__ import annotations

import copy
import inspect
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua_kernels import optim
from tests.optim.cases import SLACK

NAMES = [
    name
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
        *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Muon"),
    )
    if hasattr(torch.optim, name)
]


def torchs_table() -> ModuleType:
    """PyTorch's private table of optimizer configurations, without the locks that importing it puts on `torch.backends`."""
    with unittest.mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal import common_optimizers
    return common_optimizers


# One set of arguments each in which most terms of the update take part, with steps large enough to be seen.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "NAdam": {"lr": 0.05, "weight_decay": 0.1},
    "RAdam": {"lr": 0.05, "weight_decay": 0.1},
    "Adamax": {"lr": 0.05, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.05, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Rprop": {"lr": 0.05},
    "ASGD": {"lr": 0.05, "t0": 2, "weight_decay": 0.1},
    "Muon": {"lr": 0.05, "weight_decay": 0.1},
}

# A few roundings of numbers near 1 apart; operations come in another order.
TOLERANCES = {
    torch.float32: {"rtol": 1e-6 * SLACK, "atol": 5e-7 * SLACK},
    torch.complex64: {"rtol": 1e-6 * SLACK, "atol": 5e-7 * SLACK},
    torch.float64: {"rtol": 1e-13, "atol": 1e-14},
}
# PyTorch rounds the product of momenta to float32, its state's dtype, before it is used; the state itself is compared.
WIDER = {("NAdam", torch.float64): {"rtol": 1e-9, "atol": 1e-9}}


def ours(name: str) -> type[Optimizer]:
    return getattr(optim, name)


def theirs(name: str) -> type[Optimizer]:
    return getattr(torch.optim, name)


def implementations(name: str) -> list[str]:
    """Which of the flags `foreach` and `fused` the optimizer has."""
    return [flag for flag in ("foreach", "fused") if flag in inspect.signature(theirs(name)).parameters]


def parameters(name: str, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """A scalar, nothing, and lengths around those of vectors; matrices only for Muon."""
    shapes = [(4, 6), (6, 4), (3, 3), (1, 1)] if name == "Muon" else [(), (0,), (1,), (3, 5), (130,)]
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def gradient(parameter: Tensor, seed: int) -> Tensor:
    """Random numbers with some zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return values * (torch.rand(parameter.shape, generator=generator) < 0.8)


def train(optimizer: Optimizer, steps: Iterable[int], after: Callable[[], Any] = lambda: None) -> None:
    for step in steps:
        for index, parameter in enumerate(parameters_of(optimizer)):
            parameter.grad = gradient(parameter, 100 * step + index)
        optimizer.step()
        after()


@dataclass
class Pair:
    """Our optimizer as it was asked for, and PyTorch's with its plain loop."""

    ours: Optimizer
    theirs: Optimizer

    def __iter__(self) -> Iterator[Optimizer]:
        return iter((self.ours, self.theirs))

    def train(self, steps: Iterable[int]) -> None:
        for optimizer in self:
            train(optimizer, steps)

    def assert_same(self, **tolerance: float) -> None:
        """Parameters and everything that is kept about them."""

        def compare(what: str, mine: Any, other: Any) -> None:
            dtype = getattr(other, "dtype", None)
            wanted = tolerance or WIDER.get((type(self.theirs).__name__, dtype)) or TOLERANCES.get(dtype, {})
            torch.testing.assert_close(mine, other, **wanted, msg=lambda message: f"{what}: {message}")

        for number, (mine, other) in enumerate(zip(*map(parameters_of, self), strict=True)):
            compare(f"parameter {number}", mine, other)
            kept, expected = self.ours.state.get(mine, {}), self.theirs.state.get(other, {})
            assert set(kept) == set(expected)
            for key, value in expected.items():
                assert type(kept[key]) is type(value), key
                if isinstance(value, Tensor):
                    assert kept[key].stride() == value.stride(), key
                compare(f"{key} of parameter {number}", kept[key], value)


def plain(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a loop over parameters in PyTorch."""
    return copy.deepcopy(arguments) | dict.fromkeys(implementations(name), False)


def pair(name: str, arguments: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Pair:
    """With the arguments given, or else those of the table."""
    arguments = ARGUMENTS[name] if arguments is None else arguments
    return Pair(
        ours(name)(parameters(name, dtype), **copy.deepcopy(arguments)),
        theirs(name)(parameters(name, dtype), **plain(name, arguments)),
    )


def outcome(kind: type[Optimizer], given: Any, arguments: dict[str, Any]) -> tuple[str, type[Exception], str] | None:
    """When, how and with what words an optimizer refuses its parameters, their gradients or its arguments."""
    try:
        optimizer = kind(given, **arguments)
    except Exception as error:  # whatever it is, the other one must raise the same
        return "construction", type(error), str(error)
    try:
        for parameter in parameters_of(optimizer):
            if parameter.grad is None and parameter.is_leaf:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception as error:
        return "step", type(error), str(error)
    return None
