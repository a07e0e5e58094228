"""Vectors that have the same bits on every machine: made of random integers by operations that round once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

KINDS = ("heavy", "offset", "equal", "tiny", "huge", "inf", "nan")
FEW_KINDS = ("heavy", "inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Floats = np.ndarray[Any, np.dtype[np.float64]]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generator(n: int, salt: int = 0) -> np.random.PCG64:
    """NumPy promises the stream of a bit generator's `random_raw`, but not that of distributions."""
    return np.random.PCG64([n, salt])


def uniform(bits: np.random.PCG64, n: int) -> Floats:
    """Multiples of 2^-53 from 0 to 1."""
    raw: Any = bits.random_raw(n)
    scaled: Floats = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def normal(bits: np.random.PCG64, n: int) -> Floats:
    """Nearly normal numbers, without a function of a library: the sum of four uniform ones, scaled to variance 1."""
    total = uniform(bits, n)
    for _ in range(3):
        total = total + uniform(bits, n)
    return (total - 2.0) * 1.7320508075688772


@functools.lru_cache(maxsize=2)
def numbers(kind: str, n: int, least: float, greatest: float, salt: int) -> Floats:
    bits = generator(n, salt)
    x = normal(bits, n)
    at = int(bits.random_raw()) % n
    match kind:
        case "heavy":
            raw: Any = bits.random_raw(n)
            x = np.ldexp(x, (raw % np.uint64(24)).astype(np.int32) - 18)
        case "offset":
            x = 1000.0 + x
        case "equal":
            x = np.full_like(x, -0.3)
        case "tiny":
            x = x * (least / 8)
        case "huge":
            x = np.clip(x, -1.0, 1.0) * greatest
        case "inf":
            x[at] = -np.inf
        case "nan":
            x[at] = np.nan
        case "normal":
            pass
        case _:
            raise ValueError(f"unknown {kind=}")
    return x


def vector(kind: str, n: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """A vector of shape (n,) on the CPU."""
    limits = torch.finfo(dtype)
    x = numbers(kind, n, limits.tiny, limits.max, salt)
    return torch.from_numpy(x.astype(np.float32)).to(dtype)
