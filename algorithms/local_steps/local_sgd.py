"""Local steps with plain means of the parameters: local SGD."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop, OuterOptions
from bagua_kernels.algorithms.local_steps.outer_round import OuterRule
from bagua_kernels.algorithms.local_steps.outer_rule import Plain
from bagua_kernels.algorithms.registry import register


@register
class LocalSGD(OuterLoop):
    """Ranks train by themselves, and take the mean of their parameters once in `interval` steps (Stich, ICLR 2019).

    1. Take `interval` steps of the optimizer.
    2. Average the parameters: start -= mean(start - x), x = start.

    With a codec the differences from the last mean are encoded, which are smaller than parameters.
    """

    name = "local_sgd"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 16,
        **options: Unpack[OuterOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            interval: as for `OuterLoop`.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: as for `OuterLoop`.
        """
        super().__init__(module, optimizer, interval=interval, **options)

    @property
    def follows_writes(self) -> bool:
        """See `OuterLoop.follows_writes`; plain means of parameters are the same, whatever they are told apart from."""
        return bool(self.assignment.default.codecs) or self.penalty is not None

    def rule(self) -> OuterRule:
        """See `OuterLoop.rule`."""
        return Plain()
