"""LAMB."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bagua_kernels.launchers import multitensor
from bagua_kernels.launchers.multitensor import Variant
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.trust import multiplied, ratio, without
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.optim.step.validation import check_betas, check_not_negative
from bagua_kernels.rules.optimizers import LAMB as STEP
from bagua_kernels.rules.optimizers import LAMB_MOMENTS


class LAMB(Fused, Optimizer):
    """LAMB: Adam whose step in each tensor is proportional to the tensor's norm (You et al., ICLR 2020, algorithm 2).

    1. Update the moments as Adam does, and correct their bias.
    2. `r = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * parameter`, with corrected moments.
    3. The trust ratio is ‖parameter‖ / ‖r‖, of each tensor; 1 where one of them is 0.
    4. Move the parameter by `-lr * trust ratio * r`.

    Two passes, since the norm of the second step must be known before the fourth: 40 bytes per element.

    Args:
        params: parameters, or groups of them, as in `torch.optim`.
        lr: learning rate, relative to a tensor's norm.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: part of what the trust ratio scales.
        maximize: True to ascend.
        extras: see `bagua_kernels.optim.Extras`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        extras: Extras | None = None,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, extras=extras)

    _whole = "norms of whole tensors"
    _rule = Update(STEP, ("exp_avg", "exp_avg_sq"), ("step",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        return {
            "weight_decay": group["weight_decay"],
            "rate1": 1 - beta1,
            "beta2": beta2,
            "rate2": 1 - beta2,
            "eps": group["eps"],
            "bias1": 1 - beta1**step,
            "root_bias2": (1 - beta2**step) ** 0.5,
            # The trust ratio is multiplied in by `_launch`.
            "step_size": group["lr"],
        }

    def _launch(self, launch: Launch, rows: Any, keys: Any) -> None:
        variant = launch.variant
        moments = Variant(LAMB_MOMENTS, variant.dtypes, variant.scalars - 1, variant.extras)
        size = launch.column("step_size")
        sums = multitensor.launch(moments, launch.table, without(rows, size))
        rows = multiplied(rows, size, ratio(sums[:, 0].sqrt(), sums[:, 1].sqrt()))
        multitensor.launch(variant, launch.table, rows, keys)
