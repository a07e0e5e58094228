"""Averaged SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.options import FloatOrInf
from bagua_kernels.rules.optimizers import ASGD as RULE


class ASGD(Fused, torch.optim.ASGD):
    """`torch.optim.ASGD` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: FloatOrInf = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        *,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            lambd=lambd,
            alpha=alpha,
            t0=t0,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            capturable=capturable,
            extras=extras,
        )

    _rule = Update(RULE, ("ax",), ("step", "eta", "mu"))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        lr, eta, mu = group["lr"], counters["eta"], counters["mu"]
        counters["eta"] = lr / (1 + group["lambd"] * lr * step) ** group["alpha"]
        averaged = step - group["t0"]
        counters["mu"] = 1 / (averaged.clamp(min=1) if isinstance(averaged, Tensor) else max(1, averaged))
        decay = 1 - group["lambd"] * eta
        return {"weight_decay": group["weight_decay"], "decay": decay, "step_size": eta, "weight": mu}
