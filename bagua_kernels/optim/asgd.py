"""Averaged SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
from bagua_kernels.rules.optimizers import ASGD as RULE

UPDATE = Update(RULE, ("ax",), ("step", "eta", "mu"))


class ASGD(Fused, torch.optim.ASGD):
    """`torch.optim.ASGD` in one pass."""

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        step = counters["step"] = counters["step"] + 1
        lr, eta, mu = group["lr"], counters["eta"], counters["mu"]
        counters["eta"] = lr / (1 + group["lambd"] * lr * step) ** group["alpha"]
        averaged = step - group["t0"]
        counters["mu"] = 1 / (averaged.clamp(min=1) if isinstance(averaged, Tensor) else max(1, averaged))
        return group["weight_decay"], 1 - group["lambd"] * eta, eta, mu
