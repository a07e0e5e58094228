"""Counts the bytes of tensors that operations of a thread have made and that are still there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MappedFiles:
    """Within a `with` block, the addresses at which files are mapped for storages."""

    def __init__(self) -> None:
        self._ranges: list[range] = []
        self._plain = torch.UntypedStorage.from_file

    def __enter__(self) -> MappedFiles:
        def from_file(*args: Any, **kwargs: Any) -> torch.UntypedStorage:
            found = self._plain(*args, **kwargs)
            self._ranges.append(range(found.data_ptr(), found.data_ptr() + found.nbytes()))
            return found

        torch.UntypedStorage.from_file = staticmethod(from_file)  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.UntypedStorage.from_file = self._plain  # type: ignore[method-assign]

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return any(storage.data_ptr() in each for each in self._ranges)


class LiveBytes(TorchDispatchMode):
    """Within a `with` block, counts storages by their sizes; those that were there before, and mapped files, do not count.

    Args:
        mapped: files, which the system reads when it has to and forgets when it wants to.

    Attributes:
        peak: the most bytes that were there after an operation.
    """

    def __init__(self, mapped: MappedFiles) -> None:
        super().__init__()
        self.peak = 0
        self._mapped = mapped
        self._before: set[StorageWeakRef] = set()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for ref in _storages((args, kwargs)):
            if ref not in self._made:
                self._before.add(ref)
        result = func(*args, **kwargs)
        new = {
            ref: storage.nbytes()
            for ref, storage in _storages(result).items()
            if ref not in self._before and ref not in self._made and storage not in self._mapped
        }
        if new:
            self._made = {ref: nbytes for ref, nbytes in self._made.items() if not ref.expired()} | new
            self.peak = max(self.peak, sum(self._made.values()))
        return result


def _storages(values: Any) -> dict[StorageWeakRef, torch.UntypedStorage]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return {StorageWeakRef(each.untyped_storage()): each.untyped_storage() for each in tensors}
