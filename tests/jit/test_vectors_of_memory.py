"""What templates use in place of slices: vectors and matrices of memory that they do not own."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from numba.core import errors

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import array_at, as_bytes, as_int32, part, row, view_as
from tests.grids import folded

vector, matrix = array_at(numba.types.float32), array_at(numba.types.float32, 2)
as_double = view_as(numba.types.float64)
NAMES = {
    "part": part,
    "row": row,
    "vector": vector,
    "matrix": matrix,
    "as_bytes": as_bytes,
    "as_int32": as_int32,
    "as_double": as_double,
}
ROWS, COLUMNS = 3, 6


def doubled_parts(given, place, address, begin, end, out):
    """Doubles a part of a row, by four ways to the same memory."""
    for i in range(out.shape[0]):
        out[i] = 0
    here = part(row(given, place), begin, end)
    there = part(row(matrix(address, 3, 6), place), begin, end)
    alone = part(vector(address + 4 * 6 * place, 6), begin, end)
    for i in range(here.size):
        here[i] += there[i]
        alone[i] += np.float32(1)
    out[0], out[1], out[2] = here.size, there.size, alone.size
    whole = row(given, place)
    out[3], out[4], out[5] = as_bytes(whole).size, as_int32(whole)[0], as_double(whole).size
    out[6] = as_bytes(whole)[3]


@folded(place=[0, 2], bounds=[(0, 6), (1, 4), (5, 5), (6, 6)])
def test_same_as_slices(place: int, bounds: tuple[int, int]) -> None:
    kernel = compile_template(doubled_parts, NAMES)
    begin, end = bounds
    given = np.arange(1, 1 + ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    expected, out = given.copy(), np.empty(7, np.int64)
    expected[place, begin:end] = 2 * expected[place, begin:end] + 1
    kernel(given, place, given.ctypes.data, begin, end, out)
    assert np.array_equal(given, expected)
    assert out[:6].tolist() == [end - begin] * 3 + [24, expected[place].view(np.int32)[0], 3]
    assert out[6] == expected[place].view(np.uint8)[3]


def test_rows_may_lie_apart() -> None:
    wide = np.arange(1, 31, dtype=np.float32).reshape(3, 10)
    given, alone = wide[:, :COLUMNS], np.ones((ROWS, COLUMNS), np.float32)
    expected = wide.copy()
    expected[1, 2:5] += 1
    compile_template(doubled_parts, NAMES)(given, 1, alone.ctypes.data, 2, 5, np.empty(7, np.int64))
    assert np.array_equal(wide, expected)
    assert np.array_equal(alone[1], [1, 1, 2, 2, 2, 1])


def first_of_part(given):
    return part(given, 0, 1)[0]


def first_of_row(given):
    return row(given, 0)[0]


def test_what_is_not_contiguous_is_refused() -> None:
    numbers = np.zeros((4, 4), np.float32)
    for template, wrong in (
        (first_of_part, numbers[0, ::2]),
        (first_of_part, numbers),
        (first_of_row, numbers[0]),
        (first_of_row, np.asfortranarray(numbers)),
    ):
        with pytest.raises(
            errors.TypingError, match=r"expected a (contiguous vector|matrix with contiguous rows), got"
        ):
            compile_template(template, NAMES)(wrong)
