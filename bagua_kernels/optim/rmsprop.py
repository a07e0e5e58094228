"""RMSprop."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.scalars import Counters
from bagua_kernels.optim.update import Group, Update
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

    def _update(self, group: Group) -> Update:
        return UPDATES[bool(group["centered"]), group["momentum"] > 0]

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        counters["step"] = counters["step"] + 1
        momentum = (group["momentum"],) if group["momentum"] > 0 else ()
        return group["weight_decay"], group["alpha"], 1 - group["alpha"], group["eps"], group["lr"], *momentum
