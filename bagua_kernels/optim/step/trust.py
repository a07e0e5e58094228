"""Trust ratios: how LAMB and LARS relate the length of a step to the norm of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_kernels.upload import uploaded


def ratio(weights: Tensor, steps: Tensor) -> Tensor:
    """`weights / steps`, and 1 where one of the norms is 0."""
    return torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)


def multiplied(rows: Any, column: int, factors: Tensor) -> Any:
    """Multiplies a column of a kernel's scalars by factors of the tensors, without a wait for a GPU.

    Args:
        rows: the scalars, a NumPy array or a tensor; they are overwritten.
        column: the column's number.
        factors: float64, shape (tensors,) or (), on the device of the kernel, or on the CPU.

    Returns:
        The scalars: a NumPy array for a kernel on a CPU, or a tensor on the device of the factors.
    """
    if not isinstance(rows, Tensor) and not factors.is_cuda:
        rows[:, column] *= factors.numpy()
        return rows
    rows = rows if isinstance(rows, Tensor) else uploaded(rows, factors.device)
    # In float64 as by NumPy, and rounded once.
    rows[:, column] = rows[:, column].double() * factors
    return rows


def assign(rows: Any, column: int, values: Any) -> None:
    """Sets a column of a kernel's scalars, which are a NumPy array or a tensor, to a NumPy array."""
    rows[:, column] = uploaded(values, rows.device) if isinstance(rows, Tensor) else values


def without(rows: Any, column: int) -> Any:
    """The scalars, a NumPy array or a tensor, without one column."""
    if isinstance(rows, Tensor):
        return torch.cat([rows[:, :column], rows[:, column + 1 :]], 1)
    return np.delete(rows, column, 1)
