"""Where a tensor's elements lie, and which tensors a kernel may walk through side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from bagua_kernels.bucket import dense_strides
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
    """Whether a tensor's memory holds its elements, which it need not for a subclass with operations of its own."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return dispatch is torch.Tensor.__torch_dispatch__ and tensor.layout == torch.strided


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank has only a part of the tensor, or of a sum that it is."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def steps(tensor: Tensor, strides: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides that matter, the tensor's or others: 0 for dimensions of one element."""
    pairs = zip(tensor.shape, tensor.stride() if strides is None else strides, strict=True)
    return tuple(step if size > 1 else 0 for size, step in pairs)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    return tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one after the last that a tensor touches."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    if is_dense(tensor):
        return False
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def turns(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers tensors so that those that may share memory have different ones, ascending in their order; mostly all 0."""
    found = [0] * len(tensors)
    extents = [extent(t) for t in tensors]
    order = sorted((i for i, (begin, end) in enumerate(extents) if begin != end), key=lambda i: extents[i])
    shared: set[int] = set()
    reach, owner = 0, -1
    for i in order:
        begin, end = extents[i]
        if begin < reach:
            shared |= {owner, i}
        if end > reach:
            reach, owner = end, i
    numbers = itertools.count(1)
    for i in sorted(shared):
        found[i] = next(numbers)
    return found


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
