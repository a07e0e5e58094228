"""Vectors as Numba's values, against NumPy: which elements they touch, and how they round."""

# ruff: noqa: F821 - templates are given the names that they use.

from __future__ import annotations

import numpy as np
import pytest

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import store_fence
from bagua_kernels.launchers.low_rank import _numba_cpu_vectors as vectors
from tests.grids import grid

LANES = vectors.LANES
COUNTS = [0, 1, 7, LANES - 1, LANES]


def numbers(*shape: int) -> np.ndarray:
    # Of different magnitudes, so that a product that is not rounded by itself shows.
    random = np.random.default_rng(3)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)).astype(np.float32)


def combine(x, y, z, at, count, out):
    value = load(x, at, count) * load(y, at, count) - load(z, at, count)
    store(out, at, count, value + nothing())


def of_panel(factors, rows, at, count, out, sums, totals):
    found = load_rows(rows, at, count)
    value = dot(spread(factors), found)
    store(out, at, count, value)
    store_rows(sums, at, count, add_products(load_rows(sums, at, count), spread(factors), value))
    store_totals(totals, found)


def past_the_caches(x, out):
    for at in range(0, x.size, LANES):
        stream(out, at, load(x, at, LANES))
    store_fence()


def of_scalars(x, out):
    out[0] = total_of(load(x, 0, LANES) * repeated(x[1]))


NAMES = {
    name: getattr(vectors, name) for name in ("load", "store", "stream", "nothing", "repeated", "total_of", "LANES")
} | {"store_fence": store_fence}


@grid(cover=1, count=COUNTS)
def test_elements_beyond_the_count_are_not_touched(count: int) -> None:
    x, y, z = numbers(3, 40)
    out = np.full(40, 7, np.float32)
    compile_template(combine, NAMES)(x, y, z, 5, count, out)
    part = slice(5, 5 + count)
    expected = np.full(40, 7, np.float32)
    expected[part] = x[part] * y[part] - z[part]
    np.testing.assert_array_equal(out, expected)


@grid(cover=1, rank=[1, 2, 3, 4], count=COUNTS)
def test_panels(rank: int, count: int) -> None:
    factors, rows, before = numbers(rank), numbers(rank, 40), numbers(rank, 40)
    out, sums, totals = np.full(40, 7, np.float32), before.copy(), np.zeros(rank, np.float32)
    compile_template(of_panel, NAMES | vectors.panels(rank))(factors, rows, 9, count, out, sums, totals)
    part = slice(9, 9 + count)
    value = factors[0] * rows[0, part]
    for k in range(1, rank):
        value = value + factors[k] * rows[k, part]
    expected = np.full(40, 7, np.float32)
    expected[part] = value
    np.testing.assert_array_equal(out, expected)
    exact = before.astype(np.float64)
    exact[:, part] += np.outer(factors.astype(np.float64), value)
    sizes = np.abs(before) + 1e-30
    sizes[:, part] += np.abs(np.outer(factors, value))
    assert np.all(np.abs(sums - exact) <= 2e-7 * sizes)
    outside = np.delete(np.arange(40), np.arange(40)[part])
    np.testing.assert_array_equal(sums[:, outside], before[:, outside])
    np.testing.assert_allclose(totals, rows[:, part].sum(axis=1, dtype=np.float64), atol=1e-5 * np.abs(rows).max())


def test_streamed_numbers_arrive() -> None:
    memory = np.zeros(64 + 3 * LANES, np.float32)
    begin = -memory.ctypes.data % 64 // 4
    x, out = numbers(3 * LANES), memory[begin : begin + 3 * LANES]
    compile_template(past_the_caches, NAMES)(x, out)
    np.testing.assert_array_equal(out, x)


def test_what_is_not_contiguous_float32_is_refused() -> None:
    x = numbers(3, 40)
    for wrong in (x[0].astype(np.float64), x[0][::2]):
        with pytest.raises(Exception, match="contiguous array of float32"):
            compile_template(past_the_caches, NAMES)(wrong, x[1])


def test_numbers_become_vectors_and_sums_numbers() -> None:
    x, out = numbers(LANES), np.zeros(1, np.float32)
    compile_template(of_scalars, NAMES)(x, out)
    products = x.astype(np.float64) * x[1]
    np.testing.assert_allclose(out[0], products.sum(), atol=1e-6 * np.abs(products).sum())


def test_kernels_of_different_ranks_have_different_names() -> None:
    """Or that of one rank would be loaded from disk for another."""
    kernels = [compile_template(of_panel, NAMES | vectors.panels(rank)) for rank in (1, 2, 4)]
    assert len({kernel.__name__ for kernel in kernels}) == 3
