"""Lion."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.optim.step.validation import check_betas, check_not_negative
from bagua_kernels.rules.optimizers import LION


class Lion(Fused, Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., NeurIPS 2023, algorithm 2).

    1. Take the sign of `betas[0] * exp_avg + (1 - betas[0]) * gradient`.
    2. Shrink the parameter by `lr * weight_decay`, and move it by `lr` against that sign.
    3. Let `exp_avg` follow the gradient at the rate `1 - betas[1]`.

    Args:
        params: parameters, or groups of them, as in `torch.optim`.
        lr: size of each step; a third to a tenth of AdamW's.
        betas: of the direction, and of the momentum.
        weight_decay: decoupled; three to ten times AdamW's.
        maximize: True to ascend.
        extras: see `bagua_kernels.optim.Extras`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        extras: Extras | None = None,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, extras=extras)

    _rule = Update(LION, ("exp_avg",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        decay = 1 - group["lr"] * group["weight_decay"]
        return {"decay": decay, "beta1": beta1, "rate1": 1 - beta1, "rate2": 1 - beta2, "lr": group["lr"]}
