"""Rprop."""

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
from bagua_kernels.rules.optimizers import RPROP


class Rprop(Fused, torch.optim.Rprop):
    """`torch.optim.Rprop` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, FloatOrInf] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            etas=etas,
            step_sizes=step_sizes,
            capturable=capturable,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            extras=extras,
        )

    _rule = Update(RPROP, ("prev", "step_size"), ("step",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        counters["step"] = counters["step"] + 1
        (shrink, grow), (least, most) = group["etas"], group["step_sizes"]
        return {"shrink": shrink, "grow": grow, "least": least, "most": most}
