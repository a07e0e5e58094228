"""Outer steps: what becomes of the parameters that all ranks have in common when their mean pseudo-gradient is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bagua_kernels.algorithms.local_steps.agreement import ALONE
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import NESTEROV

Number = float | Literal["auto"]


@dataclass(frozen=True)
class Plain:
    """start -= lr d.

    Attributes:
        lr: the outer learning rate.
    """

    lr: float = 1.0

    def step(self, part: OuterRound, start: torch.Tensor, mean: torch.Tensor) -> None:
        """See `OuterRule.step`."""
        start.sub_(mean if self.lr == 1.0 else mean.mul_(self.lr))


@dataclass(frozen=True)
class Nesterov:
    """m = momentum m + d; start -= lr (d + momentum m).

    Attributes:
        lr: the outer learning rate; "auto" for what suits the round.
        momentum: at least 0 and below 1; "auto" for what suits the round.
    """

    lr: Number
    momentum: Number

    def step(self, part: OuterRound, start: torch.Tensor, mean: torch.Tensor) -> None:
        """See `OuterRule.step`."""
        agreement, lr, momentum = part.agreement, self.lr, self.momentum
        if lr == "auto":
            lr = ALONE[0] if agreement is None else agreement.outer_lr()
        if momentum == "auto":
            momentum = ALONE[1] if agreement is None else agreement.momentum(lr)
        elementwise.apply(NESTEROV, [start, part.kept("outer_momentum"), mean], [lr, momentum])
