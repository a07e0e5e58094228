"""The pass of PowerSGD that updates parameters by P Q^T, on the CPU: an optimizer's kernel reads it from the nearest cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.launchers.low_rank._numba_cpu_places import any_rank, parts
from bagua_kernels.launchers.low_rank._numba_cpu_rows import row_rules
from bagua_kernels.launchers.multitensor import GRADIENT, SKIP, Variant
from bagua_kernels.launchers.multitensor._numba_cpu import piece_kernel

# Elements of a gradient that are made before they are used: about what the optimizer's kernel asks memory for ahead of itself,
# so that memory is busy while they are made.
_NEARBY = 512


def update_some(place, begin, end, addresses, rows, tensor, keys, sums):
    columns, rank = place[COLUMNS], place[RANK]
    left, right = matrix(place[LEFT], place[ROWS], rank), matrix(place[TURNED], rank, columns)
    together = max(1, NEARBY // columns)
    own = np.empty((min(together, end - begin), columns), np.float32)
    gradient = borrowed(own)
    update, one = addresses[tensor : tensor + 1].copy(), rows[tensor : tensor + 1]
    spoilt = nothing()
    for i in range(begin, end, together):
        count = min(together, end - i)
        for k in range(count):
            spoilt = approximate_row(rank, left[i + k], right, gradient[k], False, spoilt)
        if one[0, SKIP] == 0:
            # As if all of the gradient were in memory, of which only these rows are read.
            update[0, GRADIENT] = own.ctypes.data - 4 * i * columns
            over_piece(update, one, keys, sums, 0, 0, i * columns, count * columns)
    keep(own)
    return total_of(spoilt) == 0


def update_all(table, tasks, small, addresses, rows, tensors, keys, sums, begin, end, threads, launcher):
    """As `over_tasks` by rows, with P Q^T as the gradients of an optimizer's tensors instead of an output.

    Args:
        table: as for `over_tasks`.
        tasks: as for `over_tasks`.
        small: as for `over_tasks`.
        addresses: of the optimizer's tensors, as in a `multitensor.Table`.
        rows: as `multitensor.launch` takes them.
        tensors: which of the optimizer's each row of the table is.
        keys: none, for a kernel that is not random.
        sums: none, for a kernel that has none.
        begin: as for `over_tasks`.
        end: as for `over_tasks`.
        threads: as for `shared`.
        launcher: as for `shared`.
    """
    if shared(begin, end, threads, launcher):
        return
    for task in range(begin, end):
        number = tasks[task, 0]
        if not update_some(table[number], tasks[task, 1], tasks[task, 2], addresses, rows, tensors[number], keys, sums):
            small[number] = False


@functools.cache
def update_kernel(variant: Variant, flavours: tuple[int, ...]) -> Any:
    """Compiles the pass that updates parameters by P Q^T."""
    names = parts() | {
        "over_piece": piece_kernel(variant),
        "SKIP": SKIP,
        "GRADIENT": GRADIENT,
        "NEARBY": _NEARBY,
        "approximate_row": any_rank(flavours, lambda rank: row_rules(rank)["approximate_row"]),
    }
    names["update_some"] = compile_template(update_some, names, helper=True)
    return compile_template(update_all, names)
