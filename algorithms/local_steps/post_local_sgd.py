"""Local steps after a first phase without: post-local SGD."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.local_sgd import LocalSGD
from bagua_kernels.algorithms.local_steps.outer_loop import OuterOptions
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.registry import register


@register
class PostLocalSGD(LocalSGD):
    """Averages parameters after each step at first, and then once in `interval` steps (Lin et al., ICLR 2020).

    1. In the first `first_phase` steps, take the mean of the parameters after each.
    2. Then do as `LocalSGD` does. Ranks explore by themselves when the loss has come down.
    """

    name = "post_local_sgd"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        first_phase: int = 1000,
        interval: int = 16,
        **options: Unpack[OuterOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            first_phase: the number of steps after each of which parameters are averaged.
            interval: as for `OuterLoop`, afterwards.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: `first_phase` is negative, or as for `OuterLoop`.
        """
        if first_phase < 0:
            raise ValueError(f"first_phase must be 0 or more, got {first_phase=}")
        if first_phase and options.get("by_speed"):
            raise ValueError("by_speed is for rounds of many steps: use LocalSGD instead, or first_phase=0")
        self.first_phase = first_phase
        super().__init__(module, optimizer, interval=interval, **options)

    def plan(self) -> Plan:
        """See `OuterLoop.plan`."""
        return Plan(self.interval, self.first_phase) if self.first_phase else super().plan()
