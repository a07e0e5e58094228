"""Adamax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import ADAMAX


class Adamax(Fused, torch.optim.Adamax):
    """`torch.optim.Adamax` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            capturable=capturable,
            extras=extras,
        )

    _rule = Update(ADAMAX, ("exp_avg", "exp_inf"), ("step",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        return {
            "weight_decay": group["weight_decay"],
            "rate1": 1 - beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "step_size": group["lr"] / (1 - beta1**step),
        }
