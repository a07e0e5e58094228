"""One parameter of a step, with what decides which others it shares a launch with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_kernels.launchers.multitensor import REAL
from bagua_kernels.optim.step.update import Group, Update, counter_dtype

# A counter of every parameter that is rounded at random: how often it was.
DRAWS = "draws"


@dataclass(frozen=True)
class Entry:
    """A parameter with a gradient.

    Attributes:
        position: its number among all parameters of the optimizer.
        group: its parameter group.
        update: how that is updated.
        extras: names of the extra columns.
        tensors: the columns of the table; of DTensors, the shards.
    """

    position: int
    parameter: Tensor
    state: dict[str, Any]
    group: Group
    update: Update
    extras: tuple[str, ...]
    stochastic: bool
    fresh: bool
    tensors: tuple[Tensor, ...]

    @property
    def counters(self) -> tuple[str, ...]:
        """The names of all counters."""
        return (*self.update.counters, DRAWS) if self.stochastic else self.update.counters

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the columns; those of complex numbers' parts."""
        return tuple(REAL.get(t.dtype, t.dtype) for t in self.tensors)

    def kind_of(self, counter: str) -> tuple[torch.dtype, torch.device]:
        """The dtype and device of a counter."""
        if not counter.startswith("_"):
            value = self.state[counter]
            return (value.dtype, value.device) if isinstance(value, Tensor) else (counter_dtype(), torch.device("cpu"))
        resident = self.group.get("fused") or self.group.get("capturable")
        return torch.float32, self.tensors[0].device if resident else torch.device("cpu")

    def key(self) -> tuple[Any, ...]:
        """What parameters must have in common to be in one launch."""
        counters = tuple(map(self.kind_of, self.counters))
        return self.update, self.extras, self.stochastic, self.tensors[0].device, self.dtypes, counters
