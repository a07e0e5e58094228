"""The passes of PowerSGD over whole matrices, and the work on its right factors, on the CPU.

As tensor operations the former are ten passes for rank 1 and more for each further column, and memory decides how long that
takes; the latter are many operations on few numbers. Here each is one compiled call for all matrices of a state, which finds
them by a table. What all ranks compute alike has the bits of `docs/powersgd.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import POINTER, borrowed, keep, store_fence
from bagua_kernels.jit._numba_cpu_vectors import nothing, total_of
from bagua_kernels.launchers.low_rank._numba_cpu_orthonormal import power_of_two
from bagua_kernels.launchers.low_rank._numba_cpu_rows import AHEAD, row_rules

# What the table tells of a matrix: its lengths, and where its parts are in memory. TURNED has room for a right factor by columns.
FIELDS = (
    *("ROWS", "COLUMNS", "RANK", "TOTAL", "BEFORE", "BEFORE_LEFT", "BEFORE_RIGHT"),
    *("LEFT", "RIGHT", "KEPT", "DRAWN", "TURNED", "KEPT_LEFT", "GIVEN"),
)
ROWS, COLUMNS, RANK, TOTAL, *_, GIVEN = range(len(FIELDS))
# Which averaged factors a step leaves to later ones.
KEEP_NOTHING, KEEP_RIGHT, KEEP_LEFT = range(3)
_LINE = 64  # bytes of a cache line
_NEAR = 6 << 10  # bytes of sums that cost little to come back to; a part of the nearest cache
IN_REGISTERS = (1, 2, 4)  # ranks that are compiled each by itself


def project_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
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


def over_tasks(table, places, tasks, small):
    """Takes pieces of matrices through `work`.

    Args:
        table: int64, a row for each matrix.
        places: rows of the table that are meant.
        tasks: a row of the table, and from where to where along that matrix, for each piece of the work.
        small: set to whether all that `work` made is below 2^127 in magnitude, for each row of the table.
    """
    for at in range(places.size):
        small[places[at]] = True
    for task in numba.prange(tasks.shape[0]):
        place = table[tasks[task, 0]]
        if not work(place[RANK], place, tasks[task, 1], tasks[task, 2]):
            small[tasks[task, 0]] = False


def over_places(table, places):
    """Takes matrices through `work`."""
    for at in range(places.size):
        work(table[places[at]])


def choose(rank, *arguments):
    if rank == HERE:
        return here(*arguments)
    return elsewhere(rank, *arguments)


def take_any(rank, *arguments):
    return here(*arguments)


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


def gather_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
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


def project_and_gather_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
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


def approximate_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    left, right = matrix(place[LEFT], rows, rank), matrix(place[TURNED], rank, columns)
    out = matrix(place[GIVEN], rows, columns)
    # What is not read again soon need not displace what is, nor be read before it is written.
    streamed = place[GIVEN] % LINE == 0 and 4 * columns % LINE == 0
    spoilt = nothing()
    for i in range(begin, end):
        spoilt = approximate_row(left[i], right, out[i], streamed, spoilt)
    if streamed:
        store_fence()
    return total_of(spoilt) == 0


def keep_all(table, places, small, kept):
    """Keeps the factors of the matrices that are small, and of those that are finite what `kept` says for later steps."""
    for at in range(places.size):
        if small[places[at]]:
            keep_factors(table[places[at]])
        if kept != KEEP_NOTHING:
            keep_finite(table[places[at]], kept == KEEP_LEFT)


def turn_right(place):
    columns, rank = place[COLUMNS], place[RANK]
    right, turned = matrix(place[RIGHT], columns, rank), matrix(place[TURNED], rank, columns)
    for k in range(rank):
        for j in range(columns):
            turned[k, j] = right[j, k]


def keep_factors(place):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    matrix(place[BEFORE_LEFT], rows, rank)[:] = matrix(place[LEFT], rows, rank)
    matrix(place[BEFORE_RIGHT], rank, columns)[:] = matrix(place[TURNED], rank, columns)


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
        matrix(place[KEPT_LEFT], rows, rank)[:] = left
        return
    kept, unit = matrix(place[KEPT], columns, rank), np.empty(1, np.float32)
    for k in range(rank):
        # Only the direction of a column counts; its length, that of a gradient, could overflow the next product.
        power_of_two(right[k], unit)
        for j in range(columns):
            kept[j, k] = right[k, j] / unit[0]


def matrix(address, rows, columns):
    return numba.carray(pointer(address), (rows, columns))


class Kernels(NamedTuple):
    """The compiled passes."""

    choose: Any
    turn: Any
    project: Any
    gather: Any
    project_and_gather: Any
    approximate: Any
    keep: Any


def any_rank(flavours: Sequence[int], of_flavour: Callable[[int], Any]) -> Any:
    """Compiles a function whose first argument, a rank, chooses among those for some flavours, see `Passes`."""
    *others, last = flavours
    found = compile_template(take_any, {"here": of_flavour(last)})
    for rank in others:
        found = compile_template(choose, {"HERE": rank, "here": of_flavour(rank), "elsewhere": found})
    return found


@functools.cache
def parts() -> dict[str, Any]:
    """The names that passes use, whatever the rank."""
    fields = {name: number for number, name in enumerate(FIELDS)}
    memory = {"borrowed": borrowed, "keep": keep, "store_fence": store_fence}
    sizes = {"LINE": _LINE, "NEAR": _NEAR, "AHEAD": AHEAD, "KEEP_NOTHING": KEEP_NOTHING, "KEEP_LEFT": KEEP_LEFT}
    names: dict[str, Any] = {"np": np, "nothing": nothing, "total_of": total_of, **sizes, **fields, **memory}
    names["matrix"] = compile_template(matrix, {"numba": numba, "pointer": POINTER[torch.float32]})
    names["power_of_two"] = compile_template(power_of_two, {"np": np})
    for rule in (choose_right, turn_right, keep_factors, keep_finite):
        names[rule.__name__] = compile_template(rule, names)
    return names


@functools.cache
def kernels(flavours: tuple[int, ...]) -> Kernels:
    """Compiles the passes for some flavours."""
    names = parts()

    def over(work: Any) -> Any:
        chosen = any_rank(flavours, lambda rank: compile_template(work, names | row_rules(rank)))
        return compile_template(over_tasks, {"numba": numba, "RANK": RANK, "work": chosen}, parallel=True)

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
