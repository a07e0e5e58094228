"""RMSprop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import RMSPROP, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, RMSPROP_MOMENTUM

# By whether it is centered, and whether it has momentum.
UPDATES = {
    (False, False): Update(RMSPROP, ("square_avg",), ("step",)),
    (False, True): Update(RMSPROP_MOMENTUM, ("square_avg", "momentum_buffer"), ("step",)),
    (True, False): Update(RMSPROP_CENTERED, ("square_avg", "grad_avg"), ("step",)),
    (True, True): Update(RMSPROP_CENTERED_MOMENTUM, ("square_avg", "grad_avg", "momentum_buffer"), ("step",)),
}


class RMSprop(Fused, torch.optim.RMSprop):
    """`torch.optim.RMSprop` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            capturable=capturable,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            extras=extras,
        )

    def _update(self, group: Group) -> Update:
        return UPDATES[bool(group["centered"]), group["momentum"] > 0]

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        counters["step"] = counters["step"] + 1
        names = ("weight_decay", "alpha", "eps", "lr", *(("momentum",) if group["momentum"] > 0 else ()))
        return {**{name: group[name] for name in names}, "rate": 1 - group["alpha"]}
