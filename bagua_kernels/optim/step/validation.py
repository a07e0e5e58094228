"""Checks of hyperparameters, with PyTorch's messages where it has one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_not_negative(**options: Any) -> None:
    """Raises unless all options are at least 0.

    Raises:
        ValueError: one is negative or NaN, or a tensor with more than one element.
    """
    for name, value in options.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element")
        if not value >= 0.0:
            spelled = {"lr": "learning rate", "eps": "epsilon value"}.get(name, f"{name} value")
            raise ValueError(f"Invalid {spelled}: {value}")


def check_betas(betas: tuple[Any, Any]) -> None:
    """Raises unless both decays are in [0, 1).

    Raises:
        ValueError: one is not.
    """
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
