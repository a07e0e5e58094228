"""What PyTorch calls when a parameter's gradient is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch


class TakesGradients(Protocol):
    """What has parameters by position."""

    def gradient_ready(self, position: int | None) -> None:
        """Takes the gradient of a position; None stands for a sparse one."""


Taker = TypeVar("Taker", bound=TakesGradients)


def gradient_hook(taker: weakref.ref[Taker], position: int | None) -> Callable[[torch.Tensor], None]:
    """Returns a hook that does not keep alive what it calls."""

    def hook(_: torch.Tensor) -> None:
        alive = taker()
        if alive is not None:
            alive.gradient_ready(position)

    return hook
