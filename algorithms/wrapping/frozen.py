"""Parameters that were frozen when a module was wrapped, and are not exchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def check_frozen(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises if a parameter is trained that was frozen when the module was wrapped: replicas would drift apart.

    Args:
        parameters: those that were frozen, with their names.

    Raises:
        RuntimeError: one requires gradients now.
    """
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise RuntimeError(
                f"parameter {name!r} was frozen when the module was wrapped, so that it is not exchanged: "
                "wrap the module again after requires_grad_(True), or wrap it before you freeze parameters"
            )
