"""Adadelta."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
from bagua_kernels.rules.optimizers import ADADELTA

UPDATE = Update(ADADELTA, ("square_avg", "acc_delta"), ("step",))


class Adadelta(Fused, torch.optim.Adadelta):
    """`torch.optim.Adadelta` in one pass."""

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        counters["step"] = counters["step"] + 1
        return group["weight_decay"], group["rho"], 1 - group["rho"], group["eps"], group["lr"]
