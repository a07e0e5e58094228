"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
from bagua_kernels.rules.optimizers import ADAGRAD

UPDATE = Update(ADAGRAD, ("sum",), ("step",))


class Adagrad(Fused, torch.optim.Adagrad):
    """`torch.optim.Adagrad` in one pass."""

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        step = counters["step"] = counters["step"] + 1
        return group["weight_decay"], group["eps"], group["lr"] / (1 + (step - 1) * group["lr_decay"])
