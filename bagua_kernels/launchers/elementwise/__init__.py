"""Maps a rule over flat arrays: reads one element of each, writes some of them back, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.rules.optimizers import ElementwiseRule

OP = Op(__name__)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def apply(rule: ElementwiseRule, arrays: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
    """Runs the rule over all elements, in place.

    Arithmetic is in float32. Elements of float16 and bfloat16 are converted when they are read, and rounded to nearest, ties to
    even, when they are written. If the arrays are float64, arithmetic is in float64.

    Args:
        rule: what to do with one element.
        arrays: `rule.arrays` contiguous 1-D tensors of one length on one device; either all float64 or none.
        scalars: the rule's remaining arguments.

    Raises:
        TypeError: a dtype is not supported, or float64 is mixed with others.
        ValueError: the number of arrays, a shape, a device or a memory layout does not fit.
    """
    if len(arrays) != rule.arrays:
        raise ValueError(f"rule {rule.name!r} takes {rule.arrays} arrays, got {len(arrays)}")
    for position, tensor in enumerate(arrays):
        check_array(rule, position, tensor, arrays[0])
    double = [a.dtype == torch.float64 for a in arrays]
    if any(double) and not all(double):
        raise TypeError(f"float64 arrays cannot be mixed with others, got {[str(a.dtype) for a in arrays]}")
    if arrays[0].numel():
        OP.backend(arrays[0].device).apply(rule, tuple(arrays), tuple(float(s) for s in scalars))


def check_array(rule: ElementwiseRule, position: int, tensor: torch.Tensor, first: torch.Tensor) -> None:
    """Raises unless a tensor fits beside the first one."""
    what = f"array {position} of rule {rule.name!r}"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{what} must be of dtype float32, float16, bfloat16 or float64, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.numel() != first.numel():
        raise ValueError(
            f"{what} must be 1-D with {first.numel()} elements as array 0, got shape {tuple(tensor.shape)}"
        )
    if tensor.device != first.device:
        raise ValueError(f"{what} must be on {first.device} as array 0, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous, got stride {tensor.stride()}; call .contiguous()")


def call_lines(rule: ElementwiseRule, scalars: int) -> str:
    """The source line that applies the rule to the values v0, v1, … and scalars s0, s1, …, giving r<position>."""
    results = ", ".join(f"r{position}" for position in rule.writes)
    values = [f"v{i}" for i in range(rule.arrays)] + [f"s{i}" for i in range(scalars)]
    return f"{results} = rule({', '.join(values)})"
