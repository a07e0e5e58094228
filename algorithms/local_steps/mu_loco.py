"""Local steps of Muon, with Nesterov's momentum on pseudo-gradients: MuLoCo."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.diloco import DiLoCo
from bagua_kernels.algorithms.local_steps.outer_loop import DenseOptions
from bagua_kernels.algorithms.policy.schedule import Encoding
from bagua_kernels.algorithms.registry import register


@register
class MuLoCo(DiLoCo):
    """DiLoCo around Muon, whose pseudo-gradients bear low precision better (MuLoCo, Thérien et al., 2025, algorithm 1).

    1. Take `interval` steps of the optimizer: Muon for hidden matrices, AdamW for the rest.
    2. d = mean(start - x) over all ranks, in 4 bits.
    3. m = outer_momentum m + d; start -= outer_lr (d + outer_momentum m).
    4. x = start, at once or after `delay` steps, see `OuterLoop`.

    The paper finds half to a third of the loss that local steps of AdamW cost. `bagua_kernels.optim.muon_with_adamw` makes the
    optimizer.
    """

    name = "mu_loco"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.8,
        fragments: int = 1,
        codec: Encoding = "absmax_int4",
        error_feedback: bool | None = False,
        **options: Unpack[DenseOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: a Muon, or a `ChainedOptimizer` that has one.
            interval: as for `DiLoCo`.
            outer_lr: of step 3.
            outer_momentum: of step 3. The paper has 0.6 for one rank, and 0.8 to 0.9 for 8 to 16.
            fragments: as for `DiLoCo`.
            codec: as for `OuterLoop`.
            error_feedback: as for `OuterLoop`. Four bits need none, two do (section 5 of the paper).
            **options: as for `OuterLoop`.

        Raises:
            TypeError: the optimizer has no Muon, or as for `OuterLoop`.
            ValueError: as for `DiLoCo`.
        """
        muon = getattr(torch.optim, "Muon", ())  # PyTorch 2.9
        if not any(isinstance(each, muon) for each in getattr(optimizer, "optimizers", [optimizer])):
            raise TypeError(
                f"expected an optimizer with Muon, got {optimizer!r}: make one by bagua_kernels.optim.muon_with_adamw(module), "
                "or use DiLoCo"
            )
        super().__init__(
            module,
            optimizer,
            interval=interval,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            codec=codec,
            error_feedback=error_feedback,
            **options,
        )
