"""Adamax."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
from bagua_kernels.rules.optimizers import ADAMAX

UPDATE = Update(ADAMAX, ("exp_avg", "exp_inf"), ("step",))


class Adamax(Fused, torch.optim.Adamax):
    """`torch.optim.Adamax` in one pass."""

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        return group["weight_decay"], 1 - beta1, beta2, group["eps"], group["lr"] / (1 - beta1**step)
