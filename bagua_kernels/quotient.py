"""Quotients of tensors and numbers with the same bits on every device.

PyTorch's CUDA kernels multiply a tensor by the reciprocal of a Python number. The product may differ from the quotient in the
last bit. A mean over three GPUs would then differ from a mean over three CPUs, and three thirds would not make a whole. If the
divisor is a tensor on the device, these kernels divide.
"""

from __future__ import annotations

import math

import torch


def divided(tensor: torch.Tensor, divisor: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns each element divided by a number, correctly rounded.

    Args:
        tensor: floating-point, any shape and device.
        divisor: finite and not 0.
        out: a tensor like `tensor` for the result, which may be `tensor` itself; a new one if None.

    Returns:
        `out`, or a new tensor of the shape and dtype of `tensor`.
    """
    if tensor.device.type == "cpu" or math.frexp(divisor)[0] in (0.5, -0.5):
        # The reciprocal of a power of two is exact.
        return torch.div(tensor, divisor, out=out)
    return by_tensor(tensor, divisor, out)


def by_tensor(tensor: torch.Tensor, divisor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Does what `divided` does on a GPU."""
    number = torch.full((), divisor, dtype=torch.float64, device=tensor.device)
    if tensor.dtype in _EXACT and abs(divisor) <= _EXACT[tensor.dtype] and divisor == int(divisor):
        return torch.div(tensor, number.to(tensor.dtype), out=out)
    if tensor.dtype.itemsize > 2:
        return torch.div(tensor, number, out=out)
    # A CPU divides halves in float32, by a divisor that is not rounded to a half.
    quotient = torch.div(tensor.float(), number).to(tensor.dtype)
    return quotient if out is None else out.copy_(quotient)


def divide_(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divides a tensor in place by a number; see `divided`."""
    return divided(tensor, divisor, out=tensor)


# The greatest whole number up to which all are numbers of the dtype.
_EXACT = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
