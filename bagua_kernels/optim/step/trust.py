"""Trust ratios: how LAMB and LARS relate the length of a step to the norm of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def ratio(weights: Tensor, steps: Tensor) -> Tensor:
    """`weights / steps`, and 1 where one of the norms is 0."""
    return torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)


def multiply(rows: Any, column: int, factors: Tensor) -> None:
    """Multiplies a column of a kernel's scalars, which are a NumPy array or a tensor on the factors' device."""
    rows[:, column] *= factors.to(rows.dtype) if isinstance(rows, Tensor) else factors.cpu().numpy()


def contiguous(rows: Any) -> Any:
    """The same values in one stretch of memory."""
    return rows.contiguous() if isinstance(rows, Tensor) else np.ascontiguousarray(rows)
