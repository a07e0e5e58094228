"""The words that a rule may use, as NumPy functions of the same names and meaning as in `triton.language`.

`tl` is this module when a rule is called as plain Python. Backends replace it by their own words:
`triton.language` itself, or `bagua_kernels.jit.scalar` for Numba. Beside these words a rule may use arithmetic,
comparison, bit and shift operators, literals, assignment and tuples.

With three cautions a rule computes the same everywhere. Divide and take roots with `div_rn` and `sqrt_rn`, which are correctly
rounded on every device. Write `fma` if a product and a sum must round once, because no backend contracts by itself. After integer
arithmetic `cast` back to the intended width, because Numba widens to 64 bits. Handle NaN and ties explicitly: `minimum` and
`maximum` are for integers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

float16 = np.float16
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64
uint8 = np.uint8
uint16 = np.uint16
uint32 = np.uint32


def cast(x: Any, dtype: Any, bitcast: bool = False) -> Any:
    """Converts `x` to `dtype`: by value (integers wrap), or with `bitcast` by reinterpreting its bits."""
    value = np.asarray(x)
    return (value.view(dtype) if bitcast else value.astype(dtype))[()]


def where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where `condition` holds, else `y`; both sides are computed. Literals are 32 bits wide."""
    return np.where(condition, _literal(x), _literal(y))[()]


def _literal(x: Any) -> Any:
    if isinstance(x, np.generic | np.ndarray):
        return x
    return np.float32(x) if isinstance(x, float) else np.int32(x)


def minimum(x: Any, y: Any) -> Any:
    """The lesser of two integers."""
    return np.minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    """The greater of two integers."""
    return np.maximum(x, y)


def abs(x: Any) -> Any:
    """The magnitude of `x`."""
    return np.abs(x)


def div_rn(x: Any, y: Any) -> Any:
    """`x / y`, correctly rounded; a zero divisor gives inf or NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        return np.divide(x, y)


def sqrt_rn(x: Any) -> Any:
    """The square root, correctly rounded; NaN below zero."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(x)


def fma(x: Any, y: Any, z: Any) -> Any:
    """`x * y + z`, rounded once."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if np.result_type(x, y, z) == np.float64:
            return _double_fma(*np.broadcast_arrays(x, y, z))[()]
        # The product is exact in float64.
        return _rounded_to_odd(np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)).astype(np.float32)[()]


def _rounded_to_odd(x: Any, y: Any) -> Any:
    """The float64 sum of two, with an odd last bit where something was lost.

    A second rounding is wrong only if the first one has hidden the side of a tie on which the sum lies. An odd last bit keeps
    that side.
    """
    total, lost = _exact_sum(x, y)
    bits = total.view(np.int64)
    odd = np.where(lost != 0, np.where((lost > 0) == (total > 0), bits | 1, (bits - 1) | 1), bits)
    return np.where(np.isfinite(lost), odd.view(np.float64), total)


def _exact_sum(x: Any, y: Any) -> tuple[Any, Any]:
    """The rounded sum, and what it lacks."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _double_fma(x: Any, y: Any, z: Any) -> Any:
    """The fma of float64 arrays, by sums that are rounded to odd (Boldo and Melquiond, IEEE Trans. Computers 2008)."""
    x, y, z = (np.asarray(each, np.float64) for each in (x, y, z))
    product = x * y
    # Halves of 26 bits, whose products are exact (Dekker, 1971).
    (x1, x2), (y1, y2) = _halves(x), _halves(y)
    low = x2 * y2 - (((product - x1 * y1) - x2 * y1) - x1 * y2)
    inner, lost = _exact_sum(z, low)
    total, rest = _exact_sum(product, inner)
    fused = total + _rounded_to_odd(rest, lost)
    finite = np.isfinite(x) & np.isfinite(y)
    # A product that overflows is nothing beside an infinite summand.
    plain = np.where(finite & ~np.isfinite(z), z, product + z)
    # Beyond these exponents a product or its halves overflow, or lose bits below the smallest number.
    near = np.maximum(np.abs(x), np.abs(y)) < 2.0**990
    near &= (np.abs(product) > 2.0**-960) & (np.abs(product) < 2.0**1000) & (np.abs(z) < 2.0**1000)
    result = np.where(near, fused, plain)
    far = ~near & finite & np.isfinite(z) & (x != 0) & (y != 0)
    for place in zip(*np.nonzero(np.atleast_1d(far)), strict=True):
        chosen = (float(np.atleast_1d(each)[place]) for each in (x, y, z))
        np.atleast_1d(result)[place] = _fraction_fma(*chosen)
    return result


def _halves(x: Any) -> tuple[Any, Any]:
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def _fraction_fma(x: float, y: float, z: float) -> float:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf
