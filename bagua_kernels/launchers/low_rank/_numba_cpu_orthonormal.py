"""Orthonormal columns of thin matrices on the CPU, in one compiled call for each stack of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import array, compile_template


def tree_sum(x):
    """The sum in the order of `orthonormal.tree_sum`; overwrites `x`."""
    rows = x.size
    while rows > 1:
        half = 1
        while 2 * half < rows:
            half *= 2
        for i in range(rows - half):
            x[i] += x[half + i]
        rows = half
    return x[0]


def norm(column, scratch):
    for i in range(column.size):
        scratch[i] = column[i] * column[i]
    # Rounded correctly, as there.
    return np.float32(np.sqrt(np.float64(tree_sum(scratch))))


def power_of_two(column, out):
    """Writes `orthonormal.power_of_two` of a column; returns whether it is finite."""
    bits, largest = column.view(np.int32), np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    out.view(np.int32)[0] = max(largest & np.int32(0x7F800000), np.int32(0x00800000))
    return largest < 0x7F800000


def orthonormal_columns(columns, scratch, limits):
    """`orthonormal.orthonormalize` on one matrix, given by columns."""
    rank, rows = columns.shape
    finite = True
    for k in range(rank):
        finite &= power_of_two(columns[k], limits[k : k + 1])
    if not finite:
        columns[:] = np.nan
        return
    for k in range(rank):
        unit = limits[k]
        for i in range(rows):
            columns[k, i] /= unit
    for threshold in (np.float32(16 * 2.0**-23), np.float32(0.5)):
        for k in range(rank):
            limits[k] = norm(columns[k], scratch) * threshold
        for k in range(rank):
            column = columns[k]
            length = norm(column, scratch)
            if length <= limits[k]:
                column[:] = 0
            else:
                for i in range(rows):
                    column[i] /= length
            for later in range(k + 1, rank):
                rest = columns[later]
                for i in range(rows):
                    scratch[i] = column[i] * rest[i]
                share = tree_sum(scratch)
                for i in range(rows):
                    rest[i] -= column[i] * share


def orthonormal_stack(p):
    matrices, rows, rank = p.shape
    # One after the other, a column is read in vectors.
    columns = np.empty((rank, rows), np.float32)
    scratch, limits = np.empty(rows, np.float32), np.empty(rank, np.float32)
    for matrix in range(matrices):
        for i in range(rows):
            for k in range(rank):
                columns[k, i] = p[matrix, i, k]
        orthonormal_columns(columns, scratch, limits)
        for i in range(rows):
            for k in range(rank):
                p[matrix, i, k] = columns[k, i]


@functools.cache
def _compiled() -> Any:
    names: dict[str, Any] = {"np": np, "tree_sum": compile_template(tree_sum, {}, helper=True)}
    names["norm"] = compile_template(norm, dict(names), helper=True)
    names["power_of_two"] = compile_template(power_of_two, {"np": np}, helper=True)
    columns = compile_template(orthonormal_columns, names, helper=True)
    return compile_template(orthonormal_stack, {"np": np, "orthonormal_columns": columns})


def orthonormalize(p: torch.Tensor) -> None:
    """Does what `orthonormal.orthonormalize` does, with its bits.

    Args:
        p: shape (matrices, rows, columns), contiguous float32 on the CPU.
    """
    _compiled()(array(p))
