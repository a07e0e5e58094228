"""Outer steps: what becomes of the parameters that all ranks have in common when their mean pseudo-gradient is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bagua_kernels.algorithms.local_steps.agreement import WITHOUT
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import NESTEROV

Momentum = float | Literal["auto"]


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
        lr: the outer learning rate.
        momentum: at least 0 and below 1; "auto" for what suits the round.
    """

    lr: float
    momentum: Momentum

    def step(self, part: OuterRound, start: torch.Tensor, mean: torch.Tensor) -> None:
        """See `OuterRule.step`."""
        momentum = momentum_of(part, self.momentum, self.lr)
        elementwise.apply(NESTEROV, [start, part.kept("outer_momentum"), mean], [self.lr, momentum])


def momentum_of(part: OuterRound, given: Momentum, lr: float) -> float:
    """Returns the momentum of a round.

    Args:
        part: of the bucket.
        given: the number, or "auto".
        lr: the outer learning rate.
    """
    if given != "auto":
        return given
    return WITHOUT if part.agreement is None else part.agreement.momentum(lr)
