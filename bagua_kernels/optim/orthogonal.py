"""Newton and Schulz's iteration, with which Muon makes matrices orthogonal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

Coefficients = tuple[float, float, float]


def orthogonal(matrix: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Returns matrices with singular values near 1.

    It is PyTorch's iteration, in bfloat16. Processors without instructions for that take many times as long for its products as
    for float32's. There they are products in float32 of the same values, and rounded to bfloat16: only sums have another order.

    Args:
        matrix: shape (m, n), or (copies, m, n), of any floating dtype.
        coefficients: of x, of x³ and of x⁵.
        steps: of the iteration.
        eps: the least norm by which it is divided.

    Returns:
        The matrices, in bfloat16.
    """
    native = matrix.device.type != "cpu" or multiplies_bfloat16()
    if matrix.dim() < 2 or (matrix.dim() == 2 and (native or len(coefficients) != 3 or steps >= 100)):
        return _zeropower_via_newtonschulz(matrix, coefficients, steps, eps)
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    x = _native(x, coefficients, steps) if native else _rounding(x.float(), coefficients, steps).bfloat16()
    return x.mT if tall else x


def multiplies_bfloat16() -> bool:
    """True if this processor has instructions for products of matrices in bfloat16, as PyTorch uses them."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _rounding(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Returns what the iteration makes of matrices, with products in float32 that are rounded to bfloat16.

    Args:
        x: shape (..., m, n), m at most n, float32, of values that bfloat16 has, and of singular values up to 1.
        coefficients: of x, of x³ and of x⁵.
        steps: of the iteration.

    Returns:
        Matrices of the same shape in float32, of values that bfloat16 has.
    """
    a, b, c = coefficients
    for _ in range(steps):
        gram = _rounded(x @ x.mT)
        update = _rounded(b * gram + c * (gram @ gram))
        x = _rounded(a * x + update @ x)
    return x


def _native(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """As `_rounding`, with products in bfloat16, of matrices of shape (copies, m, n)."""
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()
