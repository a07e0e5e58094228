"""Algorithms by name, for command lines and configuration files."""

from __future__ import annotations

from typing import TypeVar

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
