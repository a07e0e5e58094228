"""The passes of PowerSGD over whole matrices, on the CPU: each reads and writes them once.

As tensor operations they are ten passes for rank 1 and more for each further column; memory decides how long that takes.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import array, compile_template, run_parallel

# A sum over a row may be taken in any order: what is computed here is averaged over ranks, and no other rank repeats it.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


def project_row(total, residual, gradient, right, left):
    nothing = np.float32(0)
    for j in range(total.size):
        value = residual[j] + gradient[j]
        total[j] = value
        nothing += value * np.float32(0)
    for k in range(left.size):
        product = np.float32(0)
        for j in range(total.size):
            product += total[j] * right[k, j]
        left[k] = product
    return nothing == 0  # 0 times inf or NaN is NaN


def project_rows(total, residual, gradient, right, left, finite):
    for i in numba.prange(total.shape[0]):
        finite[i] = project_row(total[i], residual[i], gradient[i], right, left[i])


def approximate_row(total, left, right, out):
    for j in range(total.size):
        out[j] = left[0] * right[0, j]
    for k in range(1, left.size):
        for j in range(total.size):
            out[j] += left[k] * right[k, j]
    for j in range(total.size):
        total[j] -= out[j]


def is_finite(x):
    nothing = np.float32(0)
    for j in range(x.size):
        nothing += x[j] * np.float32(0)
    return nothing == 0


def approximate_rows(total, left, right, out, finite):
    for i in numba.prange(total.shape[0]):
        approximate_row(total[i], left[i], right, out[i])
        finite[i] = is_finite(total[i])


@functools.cache
def _kernels() -> tuple[Any, Any]:
    row = compile_template(project_row, {"np": np}, fastmath=_ANY_ORDER)
    project_all = compile_template(project_rows, {"numba": numba, "project_row": row}, parallel=True)
    row, finite = compile_template(approximate_row, {}), compile_template(is_finite, {"np": np}, fastmath=_ANY_ORDER)
    names = {"numba": numba, "approximate_row": row, "is_finite": finite}
    return project_all, compile_template(approximate_rows, names, parallel=True)


def suits(state: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether these passes can be used: for float32 on the CPU."""
    return state.device.type == "cpu" and all(t.dtype == torch.float32 == state.dtype for t in tensors)


def project(
    total: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor, right: torch.Tensor, left: torch.Tensor
) -> bool:
    """Writes `residual + gradient` to `total`, and its product with the columns of `right` to `left`.

    Args:
        total: shape (n, m), contiguous float32 on the CPU, like all of them.
        residual: shape (n, m).
        gradient: shape (n, m).
        right: shape (m, r).
        left: shape (n, r).

    Returns:
        Whether all of `total` is finite.
    """
    finite = np.empty(total.shape[0], dtype=np.bool_)
    columns = right.t().contiguous()
    run_parallel(_kernels()[0], *map(array, (total, residual, gradient, columns, left)), finite)
    return bool(finite.all())


def approximate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> bool:
    """Writes `left @ right.T` to `out` and subtracts it from `total`, column by column and rounded each time.

    Args:
        total: shape (n, m), contiguous float32 on the CPU, like all of them.
        left: shape (n, r).
        right: shape (m, r).
        out: shape (n, m).

    Returns:
        Whether all of `total` is finite afterwards.
    """
    finite = np.empty(total.shape[0], dtype=np.bool_)
    columns = right.t().contiguous()
    run_parallel(_kernels()[1], *map(array, (total, left, columns, out)), finite)
    return bool(finite.all())
