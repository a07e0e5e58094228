"""Local steps with Nesterov's momentum on pseudo-gradients: DiLoCo."""

from __future__ import annotations

from typing import Unpack, cast

import torch

from bagua_kernels.algorithms.local_steps.fragments import fragments_of
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop, OuterOptions
from bagua_kernels.algorithms.local_steps.outer_nesterov import check_outer
from bagua_kernels.algorithms.local_steps.outer_round import OuterRule
from bagua_kernels.algorithms.local_steps.outer_rule import Nesterov
from bagua_kernels.algorithms.registry import register


class DiLoCoOptions(OuterOptions, total=False):
    """Keyword arguments of `DiLoCo` beside its own."""

    momentum_every: int


@register
class DiLoCo(OuterLoop):
    """Ranks train by themselves, and an outer optimizer steps once in `interval` steps (Douillard et al., 2023, algorithm 1).

    1. Take `interval` steps of the optimizer, which is AdamW in the paper.
    2. d = mean(start - x) over all ranks.
    3. m = outer_momentum m + d; start -= outer_lr (d + outer_momentum m).
    4. x = start, at once or after `delay` steps, see `OuterLoop`.

    With `fragments` F, that is done for one part of the model at a time, each `interval` / F steps. That is Streaming DiLoCo
    (Douillard et al., 2025, section 2.2). A fragment has every F-th block of layers. So the line is never asked for
    the whole model at once.

    With outer_lr 1 and outer_momentum 0 that is `LocalSGD`. With momentum, one rank alone trains better for it, too.
    """

    name = "diloco"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        **options: Unpack[DiLoCoOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            interval: optimizer's steps from one exchange of a parameter to its next.
            outer_lr: of step 3. A constant pseudo-gradient moves parameters outer_lr / (1 - outer_momentum) times as far.
            outer_momentum: of step 3, at least 0 and below 1.
            fragments: a divisor of `interval`; `delay` is less than `interval` / `fragments`.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: a number does not fit, or as for `OuterLoop`.
        """
        check_outer(outer_lr, outer_momentum)
        if fragments < 1 or interval % fragments:
            raise ValueError(f"fragments must divide interval, got {fragments=} and {interval=}")
        if (momentum_every := options.pop("momentum_every", 1)) != 1:
            raise ValueError(
                f"momentum_every must be 1, got {momentum_every=}: leave it out, since a quorum trains to a lower loss with the "
                "momentum in every outer step"
            )
        self.outer_lr, self.outer_momentum, self.fragments = outer_lr, outer_momentum, fragments
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._fragment = fragments_of(names, fragments)
        super().__init__(module, optimizer, interval=interval // fragments, **cast(OuterOptions, options))

    @property
    def acts_alone(self) -> bool:
        """See `Algorithm.acts_alone`."""
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def part(self, name: str, parameter: torch.Tensor) -> int:
        """See `OuterLoop.part`: its fragment."""
        return self._fragment[name]

    def rule(self) -> OuterRule:
        """See `OuterLoop.rule`."""
        return Nesterov(self.outer_lr, self.outer_momentum)
