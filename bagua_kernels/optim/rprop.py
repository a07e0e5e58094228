"""Rprop."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
from bagua_kernels.rules.optimizers import RPROP

UPDATE = Update(RPROP, ("prev", "step_size"), ("step",))


class Rprop(Fused, torch.optim.Rprop):
    """`torch.optim.Rprop` in one pass."""

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        counters["step"] = counters["step"] + 1
        return (*group["etas"], *group["step_sizes"])
