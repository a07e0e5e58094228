"""NAdam."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.adam import moments
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.optimizers import NADAM


def rounded_product(product: Any, factor: Any, dtype: torch.dtype) -> Any:
    """The product in the dtype that the state keeps it in."""
    if dtype == torch.float64:
        return product * factor
    if isinstance(product, Tensor):
        return (product.float() * factor.float()).double()
    return float(np.float32(product) * np.float32(factor))


class NAdam(Fused, torch.optim.NAdam):
    """`torch.optim.NAdam` in one pass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
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
            momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            extras=extras,
        )

    _rule = Update(NADAM, ("exp_avg", "exp_avg_sq"), ("step", "mu_product"))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["momentum_decay"]
        mu = beta1 * (1 - 0.5 * 0.96 ** (step * decay))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * decay))
        product = counters["mu_product"] = rounded_product(counters["mu_product"], mu, counters.dtype)
        return {
            **moments(group),
            "bias2": 1 - beta2**step,
            "gradient_step": lr * (1 - mu) / (1 - product),
            "momentum_step": lr * mu_next / (1 - product * mu_next),
        }
