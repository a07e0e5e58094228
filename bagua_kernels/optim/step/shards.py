"""What a rank has of a tensor: the shard of a DTensor, and values as they are in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_kernels.optim.step.update import CannotFuseError


def local(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank, arrived if it was under way; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    shard: Tensor = to_local()
    trigger_wait = getattr(shard, "trigger_wait", None)
    if trigger_wait is not None:
        shard = trigger_wait()
    return shard


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor's memory contains its elements. A subclass with its own operations may keep them elsewhere."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return dispatch is torch.Tensor.__torch_dispatch__ and tensor.layout == torch.strided


def is_sharded(tensor: Tensor) -> bool:
    """True if a rank has only a part of the tensor, or of a sum that it is."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def shard_of_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient on this rank, as it is: not the conjugate or the negation of what lies in memory.

    Raises:
        CannotFuseError: it is distributed over ranks in another way than the parameter.
    """
    return resolved(shard_of_state(parameter, gradient))


def shard_of_state(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A gradient's or state's part on this rank.

    Raises:
        CannotFuseError: it is distributed over ranks in another way than the parameter.
    """
    ways = [(getattr(t, "placements", None), getattr(t, "device_mesh", None)) for t in (parameter, tensor)]
    if ways[0] != ways[1]:
        raise CannotFuseError(f"a gradient or state is placed as {ways[1][0]} and its parameter as {ways[0][0]}")
    return local(tensor)


def resolved(gradient: Tensor) -> Tensor:
    """The same values as they are, not as the conjugate or the negation of what lies in memory."""
    return gradient.resolve_conj().resolve_neg() if gradient.layout == torch.strided else gradient
