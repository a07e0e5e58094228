"""What ranks contribute to collectives, and what NumPy makes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bagua_kernels.comm import ReduceOp

SIZES = (0, 1, 257, 100_003)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NUMPY: dict[ReduceOp, Callable[..., np.ndarray]] = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.PRODUCT: np.multiply.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
    ReduceOp.AVG: np.mean,
    ReduceOp.BAND: np.bitwise_and.reduce,
    ReduceOp.BOR: np.bitwise_or.reduce,
    ReduceOp.BXOR: np.bitwise_xor.reduce,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank contributes; every rank can compute that of every other."""
    generator = np.random.default_rng([rank, n, salt])
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, n).astype(bool))
    if dtype in INTEGERS:
        return torch.from_numpy(generator.integers(0, 5, n)).to(dtype)
    return torch.from_numpy(generator.uniform(0.5, 1.5, n)).to(torch.float32).to(dtype)


def operations(dtype: torch.dtype) -> list[ReduceOp]:
    """The reductions that a dtype allows."""
    if dtype in FLOATS:
        return [op for op in ReduceOp if op not in BITWISE]
    return [op for op in ReduceOp if op is not ReduceOp.AVG]


def oracle(parts: list[torch.Tensor], op: ReduceOp) -> np.ndarray:
    """NumPy's reduction over ranks: in float64 for floats, exact (with wrap-around) for integers."""
    dtype = parts[0].dtype
    if dtype in FLOATS:
        return NUMPY[op](np.stack([part.double().numpy() for part in parts]), axis=0)
    stacked = np.stack([part.numpy() for part in parts])
    if dtype is torch.bool:
        either = {ReduceOp.SUM: np.any, ReduceOp.MAX: np.any, ReduceOp.PRODUCT: np.all, ReduceOp.MIN: np.all}
        return either.get(op, NUMPY[op])(stacked, axis=0)
    return NUMPY[op](stacked, axis=0, **({"dtype": stacked.dtype} if op in (ReduceOp.SUM, ReduceOp.PRODUCT) else {}))


def check(result: torch.Tensor, expected: np.ndarray) -> None:
    """Compares within the dtype's tolerance, exactly for everything but floats."""
    if result.dtype in FLOATS:
        np.testing.assert_allclose(result.double().numpy(), expected, rtol=TOLERANCE[result.dtype])
    else:
        np.testing.assert_array_equal(result.numpy(), expected)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits."""
    return bits(a) == bits(b)


def bits(x: torch.Tensor) -> bytes:
    """The memory of a tensor."""
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
