"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import ADAM, AMSGRAD

PLAIN = Update(ADAM, ("exp_avg", "exp_avg_sq"), ("step",))
GREATEST = Update(AMSGRAD, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",))


def moments(group: Group) -> dict[str, Any]:
    """The scalars that the rules of Adam and its kin share: both kinds of decay, the rates of the moments, and eps."""
    beta1, beta2 = group["betas"]
    decoupled = group["decoupled_weight_decay"]
    penalty = 0.0 if decoupled else group["weight_decay"]
    decay = 1 - group["lr"] * group["weight_decay"] if decoupled else 1.0
    return {
        "weight_decay": penalty,
        "decay": decay,
        "rate1": 1 - beta1,
        "beta2": beta2,
        "rate2": 1 - beta2,
        "eps": group["eps"],
    }


class Adam(Fused, torch.optim.Adam):
    """`torch.optim.Adam` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            extras=extras,
        )

    def _update(self, group: Group) -> Update:
        return GREATEST if group["amsgrad"] else PLAIN

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        return {**moments(group), "step_size": group["lr"] / bias1, "root_bias2": bias2**0.5}


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        extras: Extras | None = None,
    ) -> None:
        # Not Adam's constructor, whose options PyTorch's AdamW does not have.
        Fused.__init__(
            self,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            extras=extras,
        )
