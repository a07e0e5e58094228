"""Flat storage: where parameters, gradients and states lie, of which users see views."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from bagua_kernels.optim.fuse.elementwise_probe import padded
from bagua_kernels.own_storage import with_own_storage


class FlatStorage:
    """Flat storage for parameters of one group, dtype and device, for their gradients and their state, and views of it for each.

    Parameter `i` begins at `offsets[i]`, at the address `pointers[i]`; the last offset is the end of the padding behind the last
    parameter. The parameters' `views` have storages of their own.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.offsets = [0, *itertools.accumulate(padded(p) for p in params)]
        self.flat, views = self._buffer(params[0])
        self.pointers = [view.data_ptr() for view in views]
        # What writes or compares the storages of parameters, such as safetensors, finds no other parameter in them.
        self.views = [with_own_storage(view) for view in views]
        self.grad, self.grad_views = self._buffer(params[0])
        self._states: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for p, view in zip(params, self.views, strict=True):
            view.copy_(p.detach())
            p.data = view  # One by one, so that each parameter's old storage is free for what comes next.

    def holds(self, params: list[torch.Tensor]) -> bool:
        """True if these are the storage's parameters and are still in it."""
        return (
            identical(params, self.params)
            and all(map(torch.Tensor.is_set_to, params, self.views))
            # `share_memory_` moves a storage, and with it the view.
            and [p.data_ptr() for p in params] == self.pointers
        )

    @property
    def owned(self) -> set[int]:
        """Where storages of parameters begin that lie here."""
        return {self.flat.untyped_storage().data_ptr(), *self.pointers}

    def state(self, key: Any, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Flat storage for one entry of the state, of the dtype and on the device of a tensor, and its views."""
        kind = (key, like.dtype, like.device)
        if kind not in self._states:
            self._states[kind] = self._buffer(like)
        return self._states[kind]

    def _buffer(self, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = torch.zeros(self.offsets[-1], dtype=like.dtype, device=like.device)
        offsets = self.offsets[:-1]
        return flat, [flat.as_strided(p.shape, p.stride(), at) for p, at in zip(self.params, offsets, strict=True)]


def move_out(p: torch.Tensor, state: defaultdict[Any, Any]) -> None:
    """Gives a parameter and its state storage of their own: PyTorch 2.13 adds sparse gradients to views in the wrong place."""
    p.data = p.detach().clone()
    for key, value in state.get(p, {}).items():
        if isinstance(value, torch.Tensor):
            state[p][key] = value.clone()


def identical(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """True if two sequences contain the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))
