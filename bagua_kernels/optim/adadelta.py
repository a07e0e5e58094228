"""Adadelta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import ADADELTA


class Adadelta(Fused, torch.optim.Adadelta):
    """`torch.optim.Adadelta` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            rho=rho,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            capturable=capturable,
            maximize=maximize,
            differentiable=differentiable,
            extras=extras,
        )

    _rule = Update(ADADELTA, ("square_avg", "acc_delta"), ("step",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        counters["step"] = counters["step"] + 1
        named = {name: group[name] for name in ("weight_decay", "rho", "eps", "lr")}
        return {**named, "rate": 1 - group["rho"]}
