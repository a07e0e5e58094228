"""Tensors over a part of a larger memory, with a storage of their own: what writes or compares storages sees that part only."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

# Compilers for GPUs take a storage's begin for aligned: they load this many bytes at once from there.
_ALIGNED = 16


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of a dense view. Its storage is that memory alone, and keeps the whole alive.

    `torch.save` writes storages, not tensors, and safetensors refuses tensors that share one. Storages that other tensors alias
    cannot be resized. On a GPU, a view that begins at an odd address is returned as it is.

    Args:
        view: without a gradient, its elements next to each other in some order.
    """
    if view.device.type not in ("cpu", "cuda") or (view.is_cuda and view.data_ptr() % _ALIGNED):
        return view
    alone = from_dlpack(view)
    # Earlier versions of PyTorch change strides of dimensions of size 1.
    return alone if alone.stride() == view.stride() else alone.as_strided(view.shape, view.stride())
