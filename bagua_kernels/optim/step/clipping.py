"""The norm of many tensors in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bagua_kernels.launchers.multitensor import FACTOR, REAL, Table, Variant, launch
from bagua_kernels.optim.step.shards import resolved
from bagua_kernels.optim.step.strides import is_dense
from bagua_kernels.rules.optimizers import SQUARED_NORM


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of all tensors.

    Args:
        tensors: of any shapes, dtypes and devices.

    Returns:
        Shape (), float64, on the first tensor's device; squares are added in float64.
    """
    sets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor) is not Tensor and hasattr(tensor, "full_tensor"):
            raise TypeError("norms of sharded tensors need all shards; use torch.nn.utils.clip_grad_norm_")
        values = tensor.coalesce().values() if tensor.is_sparse else resolved(tensor)
        if values._is_zerotensor():
            continue
        dense = values if is_dense(values) else values.contiguous()
        sets.setdefault((dense.device, REAL.get(dense.dtype, dense.dtype)), []).append(dense)
    if not sets:
        return torch.zeros((), dtype=torch.float64)
    device = next(iter(sets))[0]
    squares = []
    for (_, dtype), members in sets.items():
        variant = Variant(SQUARED_NORM, (dtype,), scalars=0)
        rows = np.zeros((len(members), variant.width), np.float64 if variant.double else np.float32)
        rows[:, FACTOR] = 1.0
        squares.append(launch(variant, Table([members]), rows).sum().to(device))
    return torch.stack(squares).sum().sqrt()
