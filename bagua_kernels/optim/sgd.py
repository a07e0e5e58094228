"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import PLAIN_SGD
from bagua_kernels.rules.optimizers import SGD as MOMENTUM_SGD

PLAIN = Update(PLAIN_SGD)
# The first step's momentum is the gradient itself, whatever the dampening.
MOMENTUM = Update(MOMENTUM_SGD, ("momentum_buffer",), ("_fresh",))


def momentum_scalars(group: Group, counters: Counters) -> dict[str, Any]:
    """The scalars of gradient descent: with momentum if its buffer is counted, else without."""
    if not counters:
        return {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    fresh = counters["_fresh"]
    counters["_fresh"] = fresh * 0
    undamped = 1 - group["dampening"] * (1 - fresh)
    named = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
    return {**named, "undamped": undamped, "nesterov": float(group["nesterov"])}


class SGD(Fused, torch.optim.SGD):
    """`torch.optim.SGD` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            extras=extras,
        )

    def _update(self, group: Group) -> Update:
        return MOMENTUM if group["momentum"] != 0 else PLAIN

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        return momentum_scalars(group, counters)
