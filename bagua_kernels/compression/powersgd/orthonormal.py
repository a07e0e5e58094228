"""Arithmetic of PowerSGD that gives the same bits on every device: random numbers, sums, orthonormal columns.

Only elementwise IEEE operations, each rounded once, in a fixed order: what a library's dot product, norm or random
generator returns depends on the device and on the version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bagua_kernels.launchers import low_rank
from bagua_kernels.rules.random import random_bits, random_key


def name_number(name: str) -> int:
    """The first 64 bits, little-endian, of the SHA-256 of a name in UTF-8: the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def gaussian(seed: int, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Random numbers of mean 0 and variance 1, nearly normal: the sum of 12 uniform ones less 6, from -6 to 6.

    The sum is taken in integers and rounded once, so that no library function's last bit matters. Term `t` of element `i`
    out of `n` uses the random bits, defined in `docs/wire-format.md`, of index `t * n + i`.
    """
    n = math.prod(shape)
    # Arrays, since NumPy warns when a scalar wraps.
    low, high, zero = (np.array([x], np.uint32) for x in (seed & 0xFFFFFFFF, seed >> 32, 0))
    key, second_key = random_key(low, high, zero)  # type: ignore[no-untyped-call]
    total = np.full(n, -6 << 24, np.int64)
    for term in range(12):
        index = np.arange(term * n, (term + 1) * n, dtype=np.uint64).astype(np.uint32)
        total += random_bits(index, key, second_key) >> 8  # type: ignore[no-untyped-call]
    return total.astype(np.float32).reshape(shape) * np.float32(2.0**-24)


def orthonormalize(p: torch.Tensor) -> None:
    """Modified Gram-Schmidt, twice, on the columns of each matrix of a stack, in place; the same bits on every device.

    A column that depends on those before it, or is zero, becomes zero: after projection less than 16 roundings of it are
    left, which are nothing but rounding errors. (The usual threshold 1e-8 is below one float32 rounding and would keep
    them.) The second pass repairs what cancellation did to the first ("twice is enough", Giraud et al., Numer. Math. 2005).

    Args:
        p: shape (matrices, rows, columns), float32, or float64, whose roots are the library's; a matrix with inf or NaN
            becomes NaN.
    """
    if low_rank.compiled_for(p):
        low_rank.orthonormalize(p)
    else:
        orthonormalize_by_operations(p)


def orthonormalize_by_operations(p: torch.Tensor) -> None:
    """Does that by tensor operations, on any device."""
    p.masked_fill_(~finite(p), math.nan)
    p.div_(power_of_two(p))
    for threshold in (16 * torch.finfo(p.dtype).eps, 0.5):
        limit = norms(p) * threshold
        for k in range(p.shape[2]):
            column, rest = p[:, :, k : k + 1], p[:, :, k + 1 :]
            norm = norms(column)
            # Comparisons with NaN are false, so NaN stays.
            column.copy_(torch.where(norm <= limit[:, :, k : k + 1], 0.0, column / norm))
            rest -= column * tree_sum(column * rest)


def norms(x: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each column, shape (matrices, 1, columns)."""
    # A library's float32 root is not always correctly rounded (torch's on a CPU is not). One of float64, rounded to float32,
    # is: no root of a float32 number is within a float64 rounding of the middle between two float32 numbers.
    return tree_sum(x * x).double().sqrt_().to(x.dtype)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over dimension 1, kept with length 1, in one fixed order; overwrites `x`, shape (matrices, rows, columns).

    The second half, filled up with zeros to a power of two, is added to the first until one row is left.
    """
    rows = x.shape[1]
    while rows > 1:
        half = 1 << ((rows - 1).bit_length() - 1)
        x[:, : rows - half] += x[:, half:rows]
        rows = half
    return x[:, :1]


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """For each column the greatest power of two that is not above its largest magnitude; 2^-126 at least, in float32.

    Made from the bits of the exponent: a division by it is exact, and a sum of squares after it neither overflows nor vanishes.
    """
    bits, exponent, least = (
        (torch.int32, 0x7F800000, 0x00800000) if x.dtype == torch.float32 else (torch.int64, 0x7FF << 52, 1 << 52)
    )
    largest = x.abs().amax(1, keepdim=True)
    return (largest.view(bits) & exponent).clamp_(min=least).view(x.dtype)


def finite(x: torch.Tensor) -> torch.Tensor:
    """True for each matrix of a stack whose elements are all finite; shape (matrices, 1, 1)."""
    least, greatest = x.flatten(1).aminmax(dim=1)
    return (least.isfinite() & greatest.isfinite()).view(-1, 1, 1)
