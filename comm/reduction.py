"""What a reduction may be asked for, and its arithmetic in rank order on one device."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bagua_kernels.quotient import divide_, divided


class ReduceOp(enum.Enum):
    """The reduction of the values of all ranks to one.

    `AVG` takes floating-point tensors only. float32 and float64 are summed and then divided by the number of ranks.
    float16 and bfloat16 are divided first, so that the sum of large float16 values does not overflow.
    `BAND`, `BOR` and `BXOR` take integers and bool. On bool, `SUM` and `MAX` are "or", `PRODUCT` and `MIN` are "and".
    The result of `MIN` and `MAX` with a NaN depends on the backend.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
HALF = frozenset({torch.float16, torch.bfloat16})
REDUCIBLE = FLOATING | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

_ON_BOOL = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}

_Combine = Callable[..., torch.Tensor]
_COMBINE: dict[ReduceOp, _Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def check_reduction(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """Checks that `op` can be applied to `dtype`.

    Returns:
        The operation to carry out: `op` itself, or for bool the bitwise operation that it stands for.

    Raises:
        TypeError: if `op` is no `ReduceOp`, or if the dtype cannot be reduced by it.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{op=} is no reduction: pass a member of bagua_kernels.comm.ReduceOp, such as ReduceOp.SUM")
    if dtype not in REDUCIBLE:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in REDUCIBLE))
        raise TypeError(
            f"tensors of {dtype} cannot be reduced; expected one of {names}: convert the tensor, or view a complex one "
            "through torch.view_as_real"
        )
    if op is ReduceOp.AVG and dtype not in FLOATING:
        raise TypeError(f"ReduceOp.AVG expects a floating-point tensor, got {dtype}: use ReduceOp.SUM and divide")
    if op in BITWISE and dtype in FLOATING:
        raise TypeError(f"{op} expects an integer or bool tensor, got {dtype}")
    return _ON_BOOL.get(op, op) if dtype is torch.bool else op


def combine(op: ReduceOp) -> Callable[..., torch.Tensor]:
    """Returns the function of two tensors that carries out `op`, a sum for `AVG`; it takes `out`."""
    return _COMBINE[op]


def divide_first(tensor: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Divides float16 and bfloat16 before they are summed over `size` ranks; see `ReduceOp`."""
    if op is ReduceOp.AVG and tensor.dtype in HALF:
        divide_(tensor, size)


def divide_last(tensor: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Divides float32 and float64 after they were summed; see `ReduceOp`."""
    if op is ReduceOp.AVG and tensor.dtype not in HALF:
        divide_(tensor, size)


def divide_after(tensor: torch.Tensor, op: ReduceOp, size: int) -> Callable[[], None] | None:
    """Returns a function that does what `divide_last` does, later; None if there is nothing to divide."""
    return partial(divide_last, tensor, op, size) if op is ReduceOp.AVG and tensor.dtype not in HALF else None


def reduce_in_order(parts: Sequence[torch.Tensor] | torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduces one tensor per rank, from rank 0 upwards, so that the result is the same bits wherever it is computed.

    Args:
        parts: tensors of one shape and dtype, or a tensor of them; left unchanged.
        op: the reduction, as `check_reduction` returned it.

    Returns:
        A new tensor.
    """
    fold = _COMBINE[op]
    divide_first = op is ReduceOp.AVG and parts[0].dtype in HALF
    total = divided(parts[0], len(parts)) if divide_first else parts[0].clone()
    for part in parts[1:]:
        fold(total, divided(part, len(parts)) if divide_first else part, out=total)
    if op is ReduceOp.AVG and not divide_first:
        divide_(total, len(parts))
    return total
