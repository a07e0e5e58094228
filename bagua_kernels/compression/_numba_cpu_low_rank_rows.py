"""What PowerSGD's passes do with a row of a matrix, or eight, on the CPU: compiled by `row_rules`."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import wide_vectors

# A sum over a row may be taken in any order: what is computed here is averaged over ranks, and no other rank repeats it.
_ANY_ORDER = {"reassoc", "contract", "nsz"}
# Where something begins within this many elements behind the row that is written, compiled loops fear that they overlap, and sum
# in another order: results would depend on where memory happens to be. Longer rows end behind that.
NEAR = 128


def one(a, x):
    return a * x


def two(a, x, b, y):
    return a * x + b * y


def four(a, x, b, y, c, z, d, w):
    return ((a * x + b * y) + c * z) + d * w


def plus(total, a, x):
    return total + a * x


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
    approximate_any(before_left, before_right, total)
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


def renew_1(total, before, before_left, before_right, gradient, at):
    wide_vectors()
    a, x = before_left[0], before_right[0, at : at + total.size]
    nothing = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], one(a, x[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
    return nothing == 0


def renew_2(total, before, before_left, before_right, gradient, at):
    wide_vectors()
    end = at + total.size
    a, b, x, y = before_left[0], before_left[1], before_right[0, at:end], before_right[1, at:end]
    nothing = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], two(a, x[j], b, y[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
    return nothing == 0


def renew_4(total, before, before_left, before_right, gradient, at):
    wide_vectors()
    end = at + total.size
    a, b, c, d = before_left[0], before_left[1], before_left[2], before_left[3]
    x, y, z, w = before_right[0, at:end], before_right[1, at:end], before_right[2, at:end], before_right[3, at:end]
    nothing = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], four(a, x[j], b, y[j], c, z[j], d, w[j]), gradient[j])
        total[j] = value
        nothing += vanished(value)
    return nothing == 0


def renew_any(total, before, before_left, before_right, gradient, at):
    wide_vectors()
    for j in range(total.size):
        total[j] = one(before_left[0], before_right[0, at + j])
    for k in range(1, before_left.size):
        for j in range(total.size):
            total[j] = plus(total[j], before_left[k], before_right[k, at + j])
    nothing = np.float32(0)
    for j in range(total.size):
        value = renewed(before[j], total[j], gradient[j])
        total[j] = value
        nothing += vanished(value)
    return nothing == 0


def renew(total, before, before_left, before_right, gradient, at):
    """Some columns of a row of M, from `at` on; returns as `is_small`."""
    if before_left.size == 1:
        return renew_1(total, before, before_left, before_right, gradient, at)
    if before_left.size == 2:
        return renew_2(total, before, before_left, before_right, gradient, at)
    if before_left.size == 4:
        return renew_4(total, before, before_left, before_right, gradient, at)
    return renew_any(total, before, before_left, before_right, gradient, at)


def is_small(x):
    nothing = np.float32(0)
    for j in range(x.size):
        nothing += vanished(x[j])
    return nothing == 0


def approximate_row(left, right, out):
    if left.size == 1:
        approximate_1(left, right, out)
    elif left.size == 2:
        approximate_2(left, right, out)
    elif left.size == 4:
        approximate_4(left, right, out)
    else:
        approximate_any(left, right, out)
    return is_small(out)


def add_eight(out, rows, at, left, k):
    wide_vectors()
    end = at + out.size
    a, b, c, d = rows[0, at:end], rows[1, at:end], rows[2, at:end], rows[3, at:end]
    e, f, g, h = rows[4, at:end], rows[5, at:end], rows[6, at:end], rows[7, at:end]
    q, r, s, t = left[0, k], left[1, k], left[2, k], left[3, k]
    u, v, w, x = left[4, k], left[5, k], left[6, k], left[7, k]
    for j in range(out.size):
        first = (q * a[j] + r * b[j]) + (s * c[j] + t * d[j])
        out[j] += first + ((u * e[j] + v * f[j]) + (w * g[j] + x * h[j]))


def add_one(out, row, p):
    wide_vectors()
    for j in range(out.size):
        out[j] += p * row[j]


def row_rules() -> dict[str, Any]:
    """Compiles them, by name."""
    names: dict[str, Any] = {"np": np, "wide_vectors": wide_vectors}

    def add(*rules: Any, **options: Any) -> None:
        names.update({rule.__name__: compile_template(rule, names, **options) for rule in rules})

    names |= {rule.__name__: rule for rule in (one, two, four, plus, renewed, vanished)}
    add(approximate_1, approximate_2, approximate_4, approximate_any)
    add(project_1, project_2, project_4, project_any, is_small, fastmath=_ANY_ORDER)
    add(renew_1, renew_2, renew_4, renew_any, fastmath=_ANY_ORDER)
    add(approximate_row, renew)
    # Each column by itself, so that it does not matter which of them are a task.
    add(add_eight, add_one, fastmath={"contract", "nsz"})
    used = ("project_1", "project_2", "project_4", "project_any", "approximate_row", "renew", "add_eight", "add_one")
    return {name: names[name] for name in used}
