"""RAdam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.adam import moments
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import RADAM


class RAdam(Fused, torch.optim.RAdam):
    """`torch.optim.RAdam` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            extras=extras,
        )

    _rule = Update(RADAM, ("exp_avg", "exp_avg_sq"), ("step",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * step * beta2**step / bias2
        # The variance has too few terms to be estimated below five of the approximated moving average, which is at most as
        # long as its limit.
        if limit <= 5:
            rectification: Any = 0.0
        else:
            ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            rectification = (ratio * (length > 5)) ** 0.5
        own = {"lr": group["lr"], "bias1": bias1, "root_bias2": bias2**0.5, "rectification": rectification}
        return {**moments(group), **own}
