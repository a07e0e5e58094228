"""A parameter of the engine, and the engine's counters."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

# Of a parameter by its name: its kind, and whether it is exact.
Place: TypeAlias = Callable[[str, torch.nn.Parameter], tuple[Hashable, bool]]


@dataclass
class EngineCounters:
    """What the engine has counted since it was made.

    Attributes:
        steps: backward passes whose gradients were exchanged.
        wait_seconds: time that backward passes had to wait for exchanges at their end; without the compilation of kernels.
        exchange_seconds: time any communication thread was busy.
    """

    steps: int = 0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0


@dataclass(frozen=True)
class Member:
    """A parameter whose gradient is exchanged.

    Attributes:
        name: in the module.
        parameter: itself.
        kind: only parameters of one kind share a bucket.
        exact: True if its gradient lies in the part of the bucket that is not compressed.
        sparse: True if its gradient is sparse; it is then exchanged by itself, after the buckets.
    """

    name: str
    parameter: torch.nn.Parameter
    kind: Hashable = None
    exact: bool = False
    sparse: bool = False

    def placed(self, place: Place) -> Member:
        """The same parameter in another place."""
        kind, exact = place(self.name, self.parameter)
        return replace(self, kind=kind, exact=exact)
