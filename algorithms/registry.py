"""Algorithms by name, for command lines and configuration files."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from bagua_kernels.algorithms.algorithm import Algorithm

Kind = TypeVar("Kind", bound=type[Algorithm])


def register(algorithm: Kind) -> Kind:
    """Makes an algorithm known to `from_spec` by its `name`; usable as a decorator.

    Raises:
        ValueError: the name is taken by another class.
    """
    known = Algorithm.registered.setdefault(algorithm.name, algorithm)
    if known is not algorithm:
        raise ValueError(f"the algorithm name {algorithm.name!r} is taken by {known.__name__}")
    return algorithm


def names() -> list[str]:
    """The names that `from_spec` knows."""
    return sorted(Algorithm.registered)


def from_spec(spec: str, module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any) -> Algorithm:
    """Wraps a module in the algorithm that a text names, such as "bytegrad" or "bytegrad:block=128".

    Args:
        spec: a name, then its options; or a codec for `CompressedAllReduce`, such as "absmax_int8:block=256".
        module: what to wrap.
        optimizer: as for the class.
        **arguments: further arguments of the class.

    Raises:
        TypeError: the spec is no text, or an argument is of another type.
        ValueError: the name or an option is unknown, or a value does not fit.
    """
    return Algorithm.from_spec(spec, module, optimizer, **arguments)
