"""Where a tensor's elements lie in memory, and which tensors a kernel may walk through side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from bagua_kernels.bucket import dense_strides


def steps(tensor: Tensor, strides: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides that matter, the tensor's or others: 0 for dimensions of one element."""
    pairs = zip(tensor.shape, tensor.stride() if strides is None else strides, strict=True)
    return tuple(step if size > 1 else 0 for size, step in pairs)


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one stretch of memory, in any order of dimensions."""
    return tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one after the last that a tensor touches."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """True if two elements may share memory, as in an expanded tensor."""
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
