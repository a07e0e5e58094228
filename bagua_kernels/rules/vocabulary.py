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
    """`x * y + z`, rounded once if in float32; NumPy has no such operation for float64, where two roundings remain."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if np.result_type(x, y, z) == np.float64:
            return x * y + z
        product = np.multiply(x, y, dtype=np.float64)
        addend = np.asarray(z, np.float64)
        total = product + addend
        # The product is exact in float64, the sum is not. A second rounding to float32 is wrong only if the first one has hidden
        # the side of a tie on which the sum lies. An odd last bit, where something was lost, keeps that side.
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        odd = np.where(lost != 0, np.where((lost > 0) == (total > 0), bits | 1, (bits - 1) | 1), bits)
        return np.where(np.isfinite(lost), odd.view(np.float64), total).astype(np.float32)[()]
