"""Algorithms by name, for command lines and configuration files."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.compression.codec import parse_spec

Kind = TypeVar("Kind", bound=type[Algorithm])

_algorithms: dict[str, type[Algorithm]] = {}


def register(algorithm: Kind) -> Kind:
    """Makes an algorithm known to `from_spec` by its `name`; usable as a decorator.

    Raises:
        ValueError: the name is taken by another class.
    """
    if _algorithms.setdefault(algorithm.name, algorithm) is not algorithm:
        raise ValueError(f"the algorithm name {algorithm.name!r} is taken by {_algorithms[algorithm.name].__name__}")
    return algorithm


def names() -> list[str]:
    """The names that `from_spec` knows."""
    return sorted(_algorithms)


def named(name: str) -> type[Algorithm]:
    """The class that `from_spec` knows by a name.

    Raises:
        ValueError: there is none.
    """
    if name not in _algorithms:
        raise ValueError(f"there is no algorithm {name!r}; known are {', '.join(names())}")
    return _algorithms[name]


def from_spec(
    spec: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
) -> Algorithm:
    """Wraps a module in the algorithm that a text names, such as "bytegrad" or "bytegrad:block=128".

    Args:
        spec: a name, then its options.
        module: what to wrap.
        optimizer: as for the class.
        **arguments: further arguments of the class.

    Raises:
        ValueError: the name or an option is unknown, or a value does not fit.
    """
    name, parsed = parse_spec(spec)
    options: dict[str, Any] = {**parsed, **arguments}
    kind = named(name)
    try:
        return kind(module, optimizer, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(f"the options of {spec!r} do not fit: {error}") from error
