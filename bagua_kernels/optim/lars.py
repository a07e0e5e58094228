"""LARS."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bagua_kernels.launchers import multitensor
from bagua_kernels.launchers.multitensor import SCALARS, Table, Variant
from bagua_kernels.optim.sgd import momentum_scalars
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.trust import multiplied
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.optim.step.validation import check_not_negative
from bagua_kernels.rules.optimizers import LARS as RULE
from bagua_kernels.rules.optimizers import NORMS, PLAIN_LARS
from bagua_kernels.upload import uploaded

PLAIN = Update(PLAIN_LARS)
MOMENTUM = Update(RULE, ("momentum_buffer",), ("_fresh",))


class LARS(Fused, Optimizer):
    """LARS: momentum over gradients scaled to each tensor's norm (You, Gitman and Ginsburg, 2017, algorithm 1).

    1. The trust ratio of each tensor is
       `trust_coefficient * ‖parameter‖ / (‖gradient‖ + weight_decay * ‖parameter‖ + eps)`; 1 where one of the norms is 0.
    2. `d = trust ratio * (gradient + weight_decay * parameter)`.
    3. SGD with momentum on `d`, as `torch.optim.SGD` does it.

    Two passes, of which the first only reads: 28 bytes per element.

    Args:
        params: parameters, or groups of them, as in `torch.optim`. Biases and norms are better left to a group without
            weight decay or to another optimizer.
        lr: learning rate.
        momentum: of the buffer.
        weight_decay: L2 penalty.
        trust_coefficient: how far a step goes, relative to the tensor's norm.
        eps: added to the denominator of the trust ratio.
        dampening: part of the gradient that does not enter the buffer.
        nesterov: True to look one momentum step ahead.
        maximize: True to ascend.
        extras: see `bagua_kernels.optim.Extras`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        dampening: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        extras: Extras | None = None,
    ) -> None:
        check_not_negative(
            lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps
        )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "dampening": dampening,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, extras=extras)

    _by_address = False
    _whole = "norms of whole tensors"

    def _update(self, group: Group) -> Update:
        return MOMENTUM if group["momentum"] != 0 else PLAIN

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        # The trust ratio is multiplied in by `_launch`.
        return {**momentum_scalars(group, counters), "trust": 1.0}

    def _launch(self, launch: Launch, rows: Any, keys: Any) -> None:
        variant, table = launch.variant, launch.table
        # The parameter beside its master copy: where it has been written, the copy does not hold its value.
        master = variant.column(multitensor.MASTER)
        read, extras = ((0, 1), ()) if master is None else ((0, 1, master), (multitensor.MASTER,))
        norms = Variant(NORMS, tuple(variant.dtypes[i] for i in read), scalars=0, extras=extras)
        # FACTOR and SKIP are the columns of a rule without scalars.
        factors = rows[:, :SCALARS]
        factors = factors.contiguous() if isinstance(factors, Tensor) else np.ascontiguousarray(factors)
        squares = multitensor.launch(norms, Table([table.columns[i] for i in read]), factors)
        weight, gradient = squares.sqrt().unbind(1)
        coefficients = [
            [group[name] for name in ("trust_coefficient", "weight_decay", "eps")]
            for group, begin, end in launch.spans
            for _ in range(begin, end)
        ]
        coefficient, decay, eps = uploaded(np.array(coefficients, np.float64), table.device).unbind(1)
        trust = coefficient * weight / (gradient + decay * weight + eps)
        rows = multiplied(rows, launch.column("trust"), torch.where((weight > 0) & (gradient > 0), trust, 1.0))
        multitensor.launch(variant, table, rows, keys)
