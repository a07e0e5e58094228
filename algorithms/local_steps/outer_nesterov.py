"""The outer step around one optimizer, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua_kernels.algorithms.models.points import is_left_out
from bagua_kernels.launchers import elementwise
from bagua_kernels.options import checked
from bagua_kernels.rules.outer import NESTEROV


class OuterNesterov:
    """Takes an outer step of Nesterov's form once in `interval` steps of an optimizer (MuLoCo with one rank, SNOO, 2025).

    1. Take `interval` steps of the optimizer.
    2. d = start - x; m = outer_momentum m + d; start -= outer_lr (d + outer_momentum m).
    3. x = start.

    Acts through the optimizer's own hooks, so that the training loop stays as it is. `close()`, or the end of a `with` block,
    removes them.
    """

    @checked
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        interval: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
    ) -> None:
        """Starts from the parameters as they are.

        Args:
            optimizer: whose steps are counted; those that a `GradScaler` leaves out are not.
            interval: optimizer's steps from one outer step to the next.
            outer_lr: above 0.
            outer_momentum: at least 0 and below 1.

        Raises:
            TypeError: `optimizer` is something else.
            ValueError: a number does not fit.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected an optimizer, got {optimizer!r}")
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval=}")
        check_outer(outer_lr, outer_momentum)
        self.interval, self.outer_lr, self.outer_momentum = interval, outer_lr, outer_momentum
        self.steps = 0
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        dtypes = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        self._parameters = parameters
        self._starts = [_flat(p).to(dtype, copy=True) for p, dtype in zip(parameters, dtypes, strict=True)]
        self._momenta = [torch.zeros_like(start) for start in self._starts]
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if is_left_out(self._optimizer):
            return
        self.steps += 1
        if self.steps % self.interval:
            return
        for p, start, momentum in zip(self._parameters, self._starts, self._momenta, strict=True):
            x = _flat(p)
            # In float32, from `start` as the parameter can hold it: without a step the difference is zero.
            difference = start.to(x.dtype).to(start.dtype) - x
            elementwise.apply(NESTEROV, [start, momentum, difference], [self.outer_lr, self.outer_momentum])
            p.copy_(start.to(x.dtype).view(p.shape))

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, the outer parameters and the momenta."""
        return {
            "steps": self.steps,
            "starts": [start.clone() for start in self._starts],
            "momenta": [momentum.clone() for momentum in self._momenta],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: it is of other parameters.
        """
        for own, found in ((self._starts, state["starts"]), (self._momenta, state["momenta"])):
            if [each.numel() for each in own] != [each.numel() for each in found]:
                raise ValueError("the state has other parameters than the optimizer")
            for each, values in zip(own, found, strict=True):
                each.copy_(values)
        self.steps = int(state["steps"])

    def close(self) -> None:
        """Removes the hook; parameters stay as they are."""
        self._hook.remove()

    def __enter__(self) -> OuterNesterov:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_outer(outer_lr: float | str, outer_momentum: float | str) -> None:
    """Raises a ValueError unless an outer step can be taken with these; both may be "auto"."""
    steps = outer_lr == "auto" if isinstance(outer_lr, str) else outer_lr > 0
    decays = outer_momentum == "auto" if isinstance(outer_momentum, str) else 0 <= outer_momentum < 1
    if not (steps and decays):
        raise ValueError(
            f"outer_lr must be above 0, outer_momentum from 0 to below 1, got {outer_lr=} and {outer_momentum=}"
        )


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().reshape(-1)
