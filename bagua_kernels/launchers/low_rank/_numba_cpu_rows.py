"""What PowerSGD's passes do with rows of a matrix on the CPU: compiled for one rank by `row_rules`.

What is summed here may be summed in any order: it is averaged over ranks, and no other rank repeats it. M and P Q^T are made of
products that are rounded each by itself, in the order of the factors' columns.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import prefetch
from bagua_kernels.jit.rule import code_of_module, digest
from bagua_kernels.launchers.low_rank import _numba_cpu_vectors as vectors
from bagua_kernels.launchers.low_rank._numba_cpu_vectors import (
    LANES,
    load,
    nothing,
    panels,
    repeated,
    store,
    stream,
    total_of,
)

# Kernels on disk hold compiled vector operations, and must not outlive a change of these.
VECTORS = digest(code_of_module(vectors))
# Elements ahead of those that are computed with. The processor's own prefetcher stops at each page.
AHEAD = 384


def vanished(value):
    """0, unless twice the number is inf or NaN."""
    return (value + value) * nothing()


def put(out, at, count, value, streamed):
    if streamed:
        stream(out, at, value)
    else:
        store(out, at, count, value)


def for_left(value, right, sums, at, count):
    return add_products(sums, load_rows(right, at, count), value)


def for_right(value, left, sums, at, count):
    store_rows(sums, at, count, add_multiples(load_rows(sums, at, count), left, value))
    return sums


def make_part(total, before, factors, before_right, gradient, start, at, count, streamed, spoilt, other, sums):
    approximation = dot(factors, load_rows(before_right, start + at, count))
    value = (load(before, at, count) - approximation) + load(gradient, at, count)
    put(total, at, count, value, streamed)
    return spoilt + vanished(value), use(value, other, sums, at, count)


def make_row(total, before, before_left, before_right, gradient, start, reach, streamed, spoilt, other, sums):
    """Makes some columns of a row of M, and uses them, by `use`, while they are in registers.

    Args:
        total: these columns of the row of M.
        before: those of the last step's M.
        before_left: the row of the last step's P.
        before_right: all of the last step's Q, of shape (rank, columns).
        gradient: what M is renewed by, these columns of the row.
        start: the first column.
        reach: elements to ask for ahead.
        streamed: True to write past the caches.
        spoilt: a vector of 0, or NaN where an element of M has been too large.
        other: the factor that is used.
        sums: what is added to.

    Returns:
        `spoilt`, and the sums.
    """
    factors = spread(before_left)
    whole = total.size // LANES * LANES
    for at in range(0, whole, LANES):
        prefetch(before, at + reach)
        prefetch(gradient, at + reach)
        spoilt, sums = make_part(
            total, before, factors, before_right, gradient, start, at, LANES, streamed, spoilt, other, sums
        )
    if whole < total.size:
        rest = total.size - whole
        spoilt, sums = make_part(
            total, before, factors, before_right, gradient, start, whole, rest, False, spoilt, other, sums
        )
    return spoilt, sums


def project_row(total, before, before_left, before_right, gradient, right, left, streamed, spoilt):
    """Makes a row of M, and that of P = M Q, of all of Q, of shape (rank, columns); see `make_row`."""
    spoilt, sums = make_row_for_left(
        total, before, before_left, before_right, gradient, 0, AHEAD, streamed, spoilt, right, no_sums(left)
    )
    store_totals(left, sums)
    return spoilt


def renew_and_gather_row(
    total, before, before_left, before_right, gradient, left, sums, start, reach, streamed, spoilt
):
    """Makes a part of a row of M, and adds its products with the row of P to sums of shape (rank, columns); see `make_row`."""
    spoilt, _ = make_row_for_right(
        total, before, before_left, before_right, gradient, start, reach, streamed, spoilt, spread(left), sums
    )
    return spoilt


def gather_part(rows, start, a, b, c, d, sums, at, count):
    found = add_multiples(load_rows(sums, at, count), a, load(rows[0], start + at, count))
    found = add_multiples(found, b, load(rows[1], start + at, count))
    found = add_multiples(found, c, load(rows[2], start + at, count))
    store_rows(sums, at, count, add_multiples(found, d, load(rows[3], start + at, count)))


def gather_four(rows, start, left, sums):
    """Adds the products of four rows of M, from column `start` on, and of P to sums of shape (rank, columns)."""
    a, b, c, d = spread(left[0]), spread(left[1]), spread(left[2]), spread(left[3])
    columns = sums.shape[1]
    whole = columns // LANES * LANES
    for at in range(0, whole, LANES):
        for i in range(4):
            prefetch(rows[i], 4 * rows.shape[1] + start + at)
        gather_part(rows, start, a, b, c, d, sums, at, LANES)
    if whole < columns:
        gather_part(rows, start, a, b, c, d, sums, whole, columns - whole)


def gather_one(row, start, left, sums):
    """As `gather_four`, of one row."""
    own, columns = spread(left), sums.shape[1]
    for at in range(0, columns, LANES):
        count = min(LANES, columns - at)
        prefetch(row, start + at + 2 * AHEAD)
        found = add_multiples(load_rows(sums, at, count), own, load(row, start + at, count))
        store_rows(sums, at, count, found)


def approximate_row(rank, left, right, out, streamed, spoilt):
    """Writes a row of P Q^T.

    Args:
        rank: columns of the factors.
        left: the row of P.
        right: all of Q, of shape (rank, columns).
        out: the row.
        streamed: True to write past the caches.
        spoilt: a vector of 0, or NaN where an element has been too large.

    Returns:
        `spoilt`.
    """
    factors = spread(left)
    whole = out.size // LANES * LANES
    for at in range(0, whole, LANES):
        value = dot(factors, load_rows(right, at, LANES))
        put(out, at, LANES, value, streamed)
        spoilt = spoilt + vanished(value)
    if whole < out.size:
        rest = out.size - whole
        value = dot(factors, load_rows(right, whole, rest))
        put(out, whole, rest, value, False)
        spoilt = spoilt + vanished(value)
    return spoilt


def spread_any(row):
    return row


def load_rows_any(rows, at, count):
    return rows, at, count


def store_rows_any(rows, at, count, found):
    """Nothing: `add_multiples_any` has."""


def dot_any(factors, found):
    rows, at, count = found
    total = repeated(factors[0]) * load(rows[0], at, count)
    for k in range(1, factors.size):
        total = total + repeated(factors[k]) * load(rows[k], at, count)
    return total


def no_sums_any(left):
    return np.zeros((left.size, LANES), np.float32)


def add_products_any(sums, found, value):
    rows, at, count = found
    for k in range(len(sums)):
        store(sums[k], 0, LANES, load(sums[k], 0, LANES) + load(rows[k], at, count) * value)
    return sums


def add_multiples_any(found, factors, value):
    rows, at, count = found
    for k in range(len(rows)):
        store(rows[k], at, count, load(rows[k], at, count) + repeated(factors[k]) * value)
    return found


def store_totals_any(left, sums):
    for k in range(left.size):
        left[k] = total_of(load(sums[k], 0, LANES))


@functools.cache
def row_rules(rank: int) -> dict[str, Any]:
    """Compiles them for factors of so many columns, by name; 0 stands for any number."""
    names: dict[str, Any] = {
        **{"VECTORS": VECTORS, "prefetch": prefetch, "LANES": LANES, "AHEAD": AHEAD, "nothing": nothing},
        **{"load": load, "store": store, "stream": stream, "repeated": repeated, "total_of": total_of, "np": np},
    }

    def add(*rules: Any, suffix: str = "") -> None:
        for rule in rules:
            names[rule.__name__.removesuffix(suffix)] = compile_template(rule, names, inlined=True)

    if rank:
        # Vectors that are kept in registers.
        names |= panels(rank)
        names["add_multiples"] = names["add_products"]
    else:
        add(spread_any, load_rows_any, store_rows_any, dot_any, no_sums_any, suffix="_any")
        add(add_products_any, add_multiples_any, store_totals_any, suffix="_any")
    add(vanished, put, for_left, for_right, gather_part)
    for use in (for_left, for_right):
        names["use"] = names[use.__name__]
        add(make_part)
        names[f"make_row_{use.__name__}"] = compile_template(make_row, names, inlined=True)
    add(project_row, renew_and_gather_row, gather_four, gather_one, approximate_row)
    return names
