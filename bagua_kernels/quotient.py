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
        out: a tensor like `tensor` for the result; a new one if None.

    Returns:
        `out`, or a new tensor of the shape and dtype of `tensor`.
    """
    if plain(tensor, divisor):
        return torch.div(tensor, divisor, out=out)
    return by_tensor(tensor, divisor, out)


def divide_(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divides a tensor in place by a number; see `divided`. Like PyTorch's `div_`, it also takes results of autograd."""
    if plain(tensor, divisor):
        return tensor.div_(divisor)
    if needs_float32(tensor, divisor):
        return tensor.copy_(by_tensor(tensor, divisor))
    return tensor.div_(number_beside(tensor, divisor))


def plain(tensor: torch.Tensor, divisor: float) -> bool:
    """True if PyTorch divides by the number itself, or multiplies by a reciprocal that is exact: that of a power of two."""
    return tensor.device.type == "cpu" or math.frexp(divisor)[0] in (0.5, -0.5)


def by_tensor(tensor: torch.Tensor, divisor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Does what `divided` does on a GPU."""
    if not needs_float32(tensor, divisor):
        return torch.div(tensor, number_beside(tensor, divisor), out=out)
    quotient = torch.div(tensor.float(), number_beside(tensor, divisor)).to(tensor.dtype)
    return quotient if out is None else out.copy_(quotient)


def needs_float32(tensor: torch.Tensor, divisor: float) -> bool:
    """True if the divisor is not a number of the dtype, a half: a CPU divides halves in float32, by the number itself."""
    greatest = _EXACT.get(tensor.dtype)
    return greatest is not None and (divisor != int(divisor) or abs(divisor) > greatest)


def number_beside(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """The divisor on the tensor's device; a tensor without dimensions does not change the dtype of a quotient."""
    return torch.full((), divisor, dtype=torch.float64, device=tensor.device)


# The greatest whole number up to which all are numbers of the dtype.
_EXACT = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
