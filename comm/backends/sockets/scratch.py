"""Memory for what arrives, used again and again."""

from __future__ import annotations

from collections import OrderedDict

import torch


class Scratch:
    """Memory for what arrives, kept from one lane to the next: fresh pages cost more than the sum over them.

    Args:
        limit: bytes that are kept; what was used the longest ago goes first.
        most: tensors that are kept.
    """

    def __init__(self, limit: int = 64 << 20, most: int = 128) -> None:
        self._free: OrderedDict[tuple[int, torch.dtype], list[torch.Tensor]] = OrderedDict()
        self._limit, self._most = limit, most
        self._kept = self._count = 0

    def take(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `n` elements."""
        free = self._free.get((n, dtype))
        if not free:
            return torch.empty(n, dtype=dtype, device="cpu")  # whatever the default of the thread
        tensor = free.pop()
        self._kept -= tensor.nbytes
        self._count -= 1
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        """Takes memory back that nothing refers to any more."""
        key = (tensor.numel(), tensor.dtype)
        self._free.setdefault(key, []).append(tensor)
        self._free.move_to_end(key)
        self._kept += tensor.nbytes
        self._count += 1
        while self._kept > self._limit or self._count > self._most:
            n, kind = next(iter(self._free))
            if self._free[n, kind]:
                self.take(n, kind)
            else:
                del self._free[n, kind]
