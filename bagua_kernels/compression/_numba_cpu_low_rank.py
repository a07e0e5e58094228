"""The passes of PowerSGD over whole matrices, and the work on its factors, on the CPU.

As tensor operations the former are ten passes for rank 1 and more for each further column, and memory decides how long that
takes; the latter are hundreds of operations on few numbers. What all ranks compute alike has the bits of `docs/powersgd.md`.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import array, compile_template, run_parallel
from bagua_kernels.jit._numba_cpu_intrinsics import (
    VECTOR_BYTES,
    borrowed,
    keep,
    store_fence,
    stream_vector,
    wide_vectors,
)

# A sum over a row may be taken in any order: what is computed here is averaged over ranks, and no other rank repeats it.
_ANY_ORDER = {"reassoc", "contract", "nsz"}
_TASK = 1 << 15  # elements that a thread takes at a time
# Where something begins within this many elements behind the row that is written, compiled loops fear that they overlap, and sum
# in another order: results would depend on where memory happens to be. Longer rows end behind that.
_NEAR = 128


def one(a, x):
    return a * x


def two(a, x, b, y):
    return a * x + b * y


def four(a, x, b, y, c, z, d, w):
    return ((a * x + b * y) + c * z) + d * w


def renewed(total, approximation, gradient):
    return (total - approximation) + gradient


def vanished(x):
    """0, unless twice the number is inf or NaN."""
    return (x * 2.0) * 0.0


def approximate_1(left, right, out):
    wide_vectors()
    a, x = left[0], right[0]
    for j in range(out.size):
        out[j] = one(a, x[j])


def approximate_2(left, right, out):
    wide_vectors()
    a, b, x, y = left[0], left[1], right[0], right[1]
    for j in range(out.size):
        out[j] = two(a, x[j], b, y[j])


def approximate_4(left, right, out):
    wide_vectors()
    a, b, c, d = left[0], left[1], left[2], left[3]
    x, y, z, w = right[0], right[1], right[2], right[3]
    for j in range(out.size):
        out[j] = four(a, x[j], b, y[j], c, z[j], d, w[j])


def approximate_any(left, right, out):
    wide_vectors()
    for j in range(out.size):
        out[j] = left[0] * right[0, j]
    for k in range(1, left.size):
        for j in range(out.size):
            out[j] += left[k] * right[k, j]


def project_1(total, before, before_left, before_right, gradient, right, left):
    wide_vectors()
    a, x, q = before_left[0], before_right[0], right[0]
    nothing = p = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], one(a, x[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
        p += value * q[j]
    left[0] = p
    return nothing == 0


def project_2(total, before, before_left, before_right, gradient, right, left):
    wide_vectors()
    a, b, x, y = before_left[0], before_left[1], before_right[0], before_right[1]
    q, s = right[0], right[1]
    nothing = p = r = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], two(a, x[j], b, y[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
        p += value * q[j]
        r += value * s[j]
    left[0], left[1] = p, r
    return nothing == 0


def project_4(total, before, before_left, before_right, gradient, right, left):
    wide_vectors()
    a, b, c, d = before_left[0], before_left[1], before_left[2], before_left[3]
    x, y, z, w = before_right[0], before_right[1], before_right[2], before_right[3]
    q, s, u, v = right[0], right[1], right[2], right[3]
    nothing = p = r = t = o = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], four(a, x[j], b, y[j], c, z[j], d, w[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
        p += value * q[j]
        r += value * s[j]
        t += value * u[j]
        o += value * v[j]
    left[0], left[1], left[2], left[3] = p, r, t, o
    return nothing == 0


def project_any(total, before, before_left, before_right, gradient, right, left):
    wide_vectors()
    approximate(before_left, before_right, total)
    nothing = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], total[j], gradient[j])
        total[j] = value
        nothing += vanished(value)
    for k in range(left.size):
        p = np.float32(0)
        for j in range(total.size):
            p += total[j] * right[k, j]
        left[k] = p
    return nothing == 0


def project_some(total, before, before_left, before_right, gradient, right, left, small, begin, end):
    # A row takes five slices, each of which would count references atomically.
    total, before, gradient, left = borrowed(total), borrowed(before), borrowed(gradient), borrowed(left)
    before_left, before_right, right = borrowed(before_left), borrowed(before_right), borrowed(right)
    for i in range(begin, end):
        small[i] = project(total[i], before[i], before_left[i], before_right, gradient[i], right, left[i])


def project_rows(total, before, before_left, before_right, gradient, right, left, small, rows):
    for task in numba.prange(-(-total.shape[0] // rows)):
        end = min((task + 1) * rows, total.shape[0])
        some(total, before, before_left, before_right, gradient, right, left, small, task * rows, end)


def is_small(x):
    nothing = np.float32(0)
    for j in range(x.size):
        nothing += vanished(x[j])
    return nothing == 0


def approximate_some(left, right, out, small, streamed, begin, end):
    left, right, out = borrowed(left), borrowed(right), borrowed(out)
    own = np.empty(out.shape[1], np.float32)
    row = borrowed(own)
    for i in range(begin, end):
        if streamed:
            # What is not read again soon need not displace what is, nor be read before it is written.
            approximate(left[i], right, row)
            small[i] = is_small(row)
            target = out[i]
            for at in range(0, 4 * row.size, VECTOR_BYTES):
                stream_vector(target, row, at)
        else:
            approximate(left[i], right, out[i])
            small[i] = is_small(out[i])
    if streamed:
        store_fence()
    keep(own)


def approximate_rows(left, right, out, small, streamed, rows):
    for task in numba.prange(-(-out.shape[0] // rows)):
        some(left, right, out, small, streamed, task * rows, min((task + 1) * rows, out.shape[0]))


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


def orthonormal_columns(columns, bits, scratch, limits):
    """`orthonormal.orthonormalize` on one matrix, given by columns, and once more as int32."""
    rank, rows = columns.shape
    finite = True
    for k in range(rank):
        largest = np.int32(0)
        for i in range(rows):
            largest = max(largest, bits[k, i] & np.int32(0x7FFFFFFF))
        finite &= largest < 0x7F800000
        limits.view(np.int32)[k] = max(largest & np.int32(0x7F800000), np.int32(0x00800000))
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


_BY_RANK = {
    0: (approximate_any, project_any),
    1: (approximate_1, project_1),
    2: (approximate_2, project_2),
    4: (approximate_4, project_4),
}


@functools.cache
def _kernels(rank: int) -> tuple[Any, Any]:
    """Projection and approximation, for a rank, or for any if it is 0."""
    rules: dict[str, Any] = {rule.__name__: rule for rule in (one, two, four, renewed, vanished)}
    rules["wide_vectors"] = wide_vectors
    memory = {"borrowed": borrowed, "keep": keep, "store_fence": store_fence, "stream_vector": stream_vector}
    approximate, project = _BY_RANK[rank]
    approximation = compile_template(approximate, rules)
    small = compile_template(is_small, {**rules, "np": np}, fastmath=_ANY_ORDER)
    row = compile_template(project, {**rules, "np": np, "approximate": approximation}, fastmath=_ANY_ORDER)
    some = compile_template(project_some, {"borrowed": borrowed, "project": row})
    projection = compile_template(project_rows, {"numba": numba, "some": some}, parallel=True)
    names = {"np": np, "VECTOR_BYTES": VECTOR_BYTES, "approximate": approximation, "is_small": small, **memory}
    some = compile_template(approximate_some, names)
    return projection, compile_template(approximate_rows, {"numba": numba, "some": some}, parallel=True)


@functools.cache
def _orthonormal() -> Any:
    names = {"np": np, "tree_sum": compile_template(tree_sum, {})}
    names["norm"] = compile_template(norm, dict(names))
    return compile_template(orthonormal_columns, names)


def _rows(matrix: torch.Tensor) -> int:
    """How many rows a thread takes at a time."""
    return max(1, _TASK // max(1, matrix.shape[1]))


def suits(state: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether these passes can be used: for float32 on the CPU."""
    return state.device.type == "cpu" and all(t.dtype == torch.float32 == state.dtype for t in tensors)


def project(
    total: torch.Tensor,
    before: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    right: torch.Tensor,
    left: torch.Tensor,
) -> bool:
    """Writes `before - factors[0] @ factors[1].T + gradient` to `total`, and its product with the columns of `right` to `left`.

    The product of factors is rounded as in `approximate`.

    Args:
        total: shape (n, m), contiguous float32 on the CPU, like all of them.
        before: shape (n, m), other memory than `total`.
        factors: shapes (n, r) and (m, r).
        gradient: shape (n, m).
        right: shape (m, r).
        left: shape (n, r).

    Returns:
        Whether all of `total` is below 2^127 in magnitude.
    """
    small = np.empty(total.shape[0], dtype=np.bool_)
    columns, last = right.t().contiguous(), factors[1].t().contiguous()
    arrays = map(array, (total, before, factors[0], last, gradient, columns, left))
    fused = right.shape[1] in _BY_RANK and total.shape[1] >= _NEAR
    run_parallel(_kernels(right.shape[1] if fused else 0)[0], *arrays, small, _rows(total))
    return bool(small.all())


def approximate(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> bool:
    """Writes `left @ right.T` to `out`, column by column and rounded each time.

    Args:
        left: shape (n, r), contiguous float32 on the CPU, like all of them.
        right: shape (m, r).
        out: shape (n, m).

    Returns:
        Whether all of `out` is below 2^127 in magnitude.
    """
    small = np.empty(out.shape[0], dtype=np.bool_)
    streamed = out.data_ptr() % VECTOR_BYTES == 0 == 4 * out.shape[1] % VECTOR_BYTES
    arrays = map(array, (left, right.t().contiguous(), out))
    run_parallel(_kernels(right.shape[1] if right.shape[1] in _BY_RANK else 0)[1], *arrays, small, streamed, _rows(out))
    return bool(small.all())


def orthonormalize(p: torch.Tensor) -> None:
    """Does what `orthonormal.orthonormalize` does, with its bits.

    Args:
        p: shape (matrices, rows, columns), float32 on the CPU.
    """
    columns = array(p.transpose(1, 2).contiguous())
    bits, scratch, limits = columns.view(np.int32), np.empty(p.shape[1], np.float32), np.empty(p.shape[2], np.float32)
    for matrix, as_bits in zip(columns, bits, strict=True):
        _orthonormal()(matrix, as_bits, scratch, limits)
    p.copy_(torch.from_numpy(columns).transpose(1, 2))
