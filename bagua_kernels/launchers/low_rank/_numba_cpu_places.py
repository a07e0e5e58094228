"""What PowerSGD's passes do with one matrix by its row of the table, and the choice among ranks, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import types

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import array_at, borrowed, keep, store_fence
from bagua_kernels.launchers.low_rank import FIELDS, KEEP_LEFT, KEEP_NOTHING
from bagua_kernels.launchers.low_rank._numba_cpu_orthonormal import power_of_two
from bagua_kernels.launchers.low_rank._numba_cpu_rows import AHEAD, VECTORS
from bagua_kernels.launchers.low_rank._numba_cpu_vectors import nothing, total_of

_LINE = 64  # bytes of a cache line
_NEAR = 6 << 10  # bytes of sums that cost little to come back to; a part of the nearest cache


def copy(source, destination):
    """Copies a matrix. An assignment of one would compile the text of its error about shapes, which takes two seconds."""
    rows, columns = source.shape
    for i in range(rows):
        for j in range(columns):
            destination[i, j] = source[i, j]


def choose_right(place):
    """Writes the right factor that is used next, by columns."""
    columns, rank = place[COLUMNS], place[RANK]
    kept, drawn = matrix(place[KEPT], columns, rank), matrix(place[DRAWN], columns, rank)
    turned = matrix(place[TURNED], rank, columns)
    for k in range(rank):
        # A column that became zero would stay zero whatever gradients come.
        zero = True
        for j in range(columns):
            zero &= kept[j, k] == 0
        for j in range(columns):
            turned[k, j] = drawn[j, k] if zero else kept[j, k]


def turn_right(place):
    columns, rank = place[COLUMNS], place[RANK]
    right, turned = matrix(place[RIGHT], columns, rank), matrix(place[TURNED], rank, columns)
    for k in range(rank):
        for j in range(columns):
            turned[k, j] = right[j, k]


def keep_factors(place):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    copy(matrix(place[LEFT], rows, rank), matrix(place[BEFORE_LEFT], rows, rank))
    copy(matrix(place[TURNED], rank, columns), matrix(place[BEFORE_RIGHT], rank, columns))


def keep_finite(place, only_left):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    left, right = matrix(place[LEFT], rows, rank), matrix(place[TURNED], rank, columns)
    spoilt = np.float32(0)
    for i in range(rows):
        for k in range(rank):
            spoilt += left[i, k] * np.float32(0)
    for k in range(rank):
        for j in range(columns):
            spoilt += right[k, j] * np.float32(0)
    if spoilt != 0:
        return
    if only_left:
        copy(left, matrix(place[KEPT_LEFT], rows, rank))
        return
    kept, unit = matrix(place[KEPT], columns, rank), np.empty(1, np.float32)
    for k in range(rank):
        # Only the direction of a column counts; its length, that of a gradient, could overflow the next product.
        power_of_two(right[k], unit)
        for j in range(columns):
            kept[j, k] = right[k, j] / unit[0]


def choose(rank, *arguments):
    if rank == HERE:
        return here(rank, *arguments)
    return elsewhere(rank, *arguments)


def any_rank(flavours: Sequence[int], of_flavour: Callable[[int], Any]) -> Any:
    """Compiles a function whose first argument, a rank, chooses among those for some flavours, see `Passes`."""
    *others, last = flavours
    found = of_flavour(last)
    for rank in others:
        found = compile_template(choose, {"HERE": rank, "here": of_flavour(rank), "elsewhere": found}, helper=True)
    return found


@functools.cache
def parts() -> dict[str, Any]:
    """The names that passes use, whatever the rank."""
    fields = {name: number for number, name in enumerate(FIELDS)}
    memory = {"borrowed": borrowed, "keep": keep, "store_fence": store_fence}
    sizes = {"LINE": _LINE, "NEAR": _NEAR, "AHEAD": AHEAD, "KEEP_NOTHING": KEEP_NOTHING, "KEEP_LEFT": KEEP_LEFT}
    names: dict[str, Any] = {
        "np": np,
        "matrix": array_at(types.float32, 2),
        "VECTORS": VECTORS,
        "nothing": nothing,
        "total_of": total_of,
        **sizes,
        **fields,
        **memory,
    }
    names["power_of_two"] = compile_template(power_of_two, {"np": np}, helper=True)
    for rule in (copy, choose_right, turn_right, keep_factors, keep_finite):
        names[rule.__name__] = compile_template(rule, names, helper=True)
    return names
