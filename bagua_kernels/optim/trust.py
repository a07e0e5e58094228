"""Trust ratios: how LAMB and LARS relate the length of a step to the norm of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagua_kernels.optim.plan import Launch


def ratio(weights: Tensor, steps: Tensor) -> Tensor:
    """`weights / steps`, and 1 where one of the norms is 0."""
    return torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)


def multiply(rows: Any, column: int, factors: Tensor) -> None:
    """Multiplies a column of a kernel's scalars, which are a NumPy array or a tensor on the factors' device."""
    rows[:, column] *= factors.to(rows.dtype) if isinstance(rows, Tensor) else factors.cpu().numpy()


def no_shards(optimizer: object, launch: Launch) -> None:
    """Raises if a parameter is only a shard here.

    Raises:
        RuntimeError: it is, and its norm would need the other ranks.
    """
    if any(hasattr(p, "placements") and not all(q.is_replicate() for q in p.placements) for p in launch.params):
        raise RuntimeError(
            f"{type(optimizer).__name__} needs norms of whole tensors, and a parameter is sharded over ranks; use AdamW"
        )
