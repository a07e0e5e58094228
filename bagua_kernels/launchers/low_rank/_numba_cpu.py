"""The passes of PowerSGD over whole matrices, and the work on its right factors, on the CPU.

As tensor operations the former are ten passes for rank 1 and more for each further column, limited by memory. The latter
are many operations on few numbers. Here each is one compiled call for all matrices of a state, which finds
them by a table. What all ranks compute alike has the bits of `docs/powersgd.md`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run_all as run_all
from bagua_kernels.launchers.low_rank import RANK
from bagua_kernels.launchers.low_rank._numba_cpu_orthonormal import orthonormalize as orthonormalize
from bagua_kernels.launchers.low_rank._numba_cpu_places import any_rank, parts
from bagua_kernels.launchers.low_rank._numba_cpu_rows import row_rules
from bagua_kernels.launchers.low_rank._numba_cpu_update import update_kernel as update_kernel


def project_some(rank, place, begin, end):
    rows, columns = place[ROWS], place[COLUMNS]
    total, before = matrix(place[TOTAL], rows, columns), matrix(place[BEFORE], rows, columns)
    gradient = matrix(place[GIVEN], rows, columns)
    left, before_left = matrix(place[LEFT], rows, rank), matrix(place[BEFORE_LEFT], rows, rank)
    right, before_right = matrix(place[TURNED], rank, columns), matrix(place[BEFORE_RIGHT], rank, columns)
    streamed = place[TOTAL] % LINE == 0 and 4 * columns % LINE == 0
    spoilt = nothing()
    for i in range(begin, end):
        spoilt = project_row(
            total[i], before[i], before_left[i], before_right, gradient[i], right, left[i], streamed, spoilt
        )
    if streamed:
        store_fence()
    return total_of(spoilt) == 0


def over_tasks(table, tasks, small, begin, end, threads, launcher):
    """Takes pieces of matrices through `work`.

    Args:
        table: int64, a row for each matrix.
        tasks: a row of the table, and from where to where along that matrix, for each piece of the work.
        small: cleared where not all that `work` made is below 2^127 in magnitude, for each row of the table.
        begin: the first task that is meant.
        end: where these end.
        threads: as for `shared`.
        launcher: as for `shared`.
    """
    if shared(begin, end, threads, launcher):
        return
    for task in range(begin, end):
        place = table[tasks[task, 0]]
        if not work(place[RANK], place, tasks[task, 1], tasks[task, 2]):
            small[tasks[task, 0]] = False


def over_places(table, places):
    """Takes matrices through `work`."""
    for at in range(places.size):
        work(table[places[at]])


def gather_some(rank, place, begin, end):
    rows, columns = place[ROWS], place[COLUMNS]
    total, left = matrix(place[TOTAL], rows, columns), matrix(place[LEFT], rows, rank)
    right = matrix(place[RIGHT], columns, rank)
    own = np.zeros((rank, end - begin), np.float32)
    sums = borrowed(own)
    # Sums are read and written anew for each row, or four; but memory is read fastest along one line.
    fours = 0 if end - begin == columns and 4 * rank * columns <= NEAR else rows // 4 * 4
    for i in range(0, fours, 4):
        gather_four(total[i : i + 4], begin, left[i : i + 4], sums)
    for i in range(fours, rows):
        gather_one(total[i], begin, left[i], sums)
    for j in range(begin, end):
        for k in range(rank):
            right[j, k] = sums[k, j - begin]
    keep(own)
    return True


def project_and_gather_some(rank, place, begin, end):
    rows, columns = place[ROWS], place[COLUMNS]
    total, before = matrix(place[TOTAL], rows, columns), matrix(place[BEFORE], rows, columns)
    gradient = matrix(place[GIVEN], rows, columns)
    left, before_left = matrix(place[LEFT], rows, rank), matrix(place[BEFORE_LEFT], rows, rank)
    right, before_right = matrix(place[RIGHT], columns, rank), matrix(place[BEFORE_RIGHT], rank, columns)
    streamed = (place[TOTAL] + 4 * begin) % LINE == 0 and 4 * columns % LINE == 0 and 4 * (end - begin) % LINE == 0
    # What follows in memory is not this task's, unless it has all columns.
    reach = AHEAD if end - begin == columns else columns * max(1, AHEAD // (end - begin))
    own = np.zeros((rank, end - begin), np.float32)
    sums = borrowed(own)
    spoilt = nothing()
    for i in range(rows):
        made, old, new = total[i, begin:end], before[i, begin:end], gradient[i, begin:end]
        spoilt = renew_and_gather_row(
            made, old, before_left[i], before_right, new, left[i], sums, begin, reach, streamed, spoilt
        )
    if streamed:
        store_fence()
    for j in range(begin, end):
        for k in range(rank):
            right[j, k] = sums[k, j - begin]
    keep(own)
    return total_of(spoilt) == 0


def approximate_some(rank, place, begin, end):
    rows, columns = place[ROWS], place[COLUMNS]
    left, right = matrix(place[LEFT], rows, rank), matrix(place[TURNED], rank, columns)
    out = matrix(place[GIVEN], rows, columns)
    # What is not read again soon need not displace what is, nor be read before it is written.
    streamed = place[GIVEN] % LINE == 0 and 4 * columns % LINE == 0
    spoilt = nothing()
    for i in range(begin, end):
        spoilt = approximate_row(rank, left[i], right, out[i], streamed, spoilt)
    if streamed:
        store_fence()
    return total_of(spoilt) == 0


def keep_all(table, places, small, kept):
    """Stores the factors of the small matrices, and for the finite ones those that `kept` selects for later steps."""
    for at in range(places.size):
        if small[places[at]]:
            keep_factors(table[places[at]])
        if kept != KEEP_NOTHING:
            keep_finite(table[places[at]], kept == KEEP_LEFT)


class Kernels(NamedTuple):
    """The compiled passes."""

    choose: Any
    turn: Any
    project: Any
    gather: Any
    project_and_gather: Any
    approximate: Any
    keep: Any


@functools.cache
def kernels(flavours: tuple[int, ...]) -> Kernels:
    """Compiles the passes for some flavours."""
    names = parts()

    def over(work: Any) -> Any:
        chosen = any_rank(flavours, lambda rank: compile_template(work, names | row_rules(rank), helper=True))
        return compile_template(over_tasks, {"RANK": RANK, "work": chosen})

    return Kernels(
        choose=compile_template(over_places, {"work": names["choose_right"]}),
        turn=compile_template(over_places, {"work": names["turn_right"]}),
        project=over(project_some),
        gather=over(gather_some),
        project_and_gather=over(project_and_gather_some),
        approximate=over(approximate_some),
        # Nobody is to look at a state of which half is kept.
        keep=compile_template(keep_all, names, nogil=False),
    )
