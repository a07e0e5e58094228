"""Runs: neighbours in flat storage that an optimizer steps as one tensor."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from bagua_kernels.optim.fuse.flat_storage import FlatStorage

_PLAIN = (bool, int, float, complex, str, type(None))


class Run:
    """Neighbours in a storage that are stepped as one flat tensor: their states have the same keys and equal scalars.

    `tensor` is what the optimizer sees in their place, and `kept` what is in its state, None where it has no state yet. `stacks`
    holds, for each entry that is a scalar, a copy for each parameter.
    """

    def __init__(self, storage: FlatStorage, first: int, last: int, state: defaultdict[Any, Any]) -> None:
        self.storage, self.members = storage, slice(first, last)
        self.params = storage.params[self.members]
        self.span = slice(storage.offsets[first], storage.offsets[last])
        self.tensor = torch.nn.Parameter(storage.flat[self.span])
        self.tensor.grad = storage.grad[self.span]
        self.stacks: dict[Any, torch.Tensor] = {}
        self.kept: dict[Any, Any] | None = None
        if self.params[0] in state:
            self.kept = {}
            for key, value in list(state[self.params[0]].items()):
                if isinstance(value, torch.Tensor) and value.shape == self.params[0].shape:
                    flat, views = storage.state(key, value)
                    for p, view in zip(self.params, views[self.members], strict=True):
                        if state[p][key] is not view:
                            view.copy_(state[p][key])
                            state[p][key] = view
                    self.kept[key] = flat[self.span]
                else:
                    self._adopt(key, value.clone() if isinstance(value, torch.Tensor) else value, state)

    def publish(self, new: dict[Any, Any], state: defaultdict[Any, Any]) -> None:
        """Brings what the optimizer left in the run's state into the states of the parameters."""
        if self.kept is None:
            self.kept = {}
            for p in self.params:
                state[p] = {}
        for key in self.kept.keys() - new.keys():
            del self.kept[key]
            self.stacks.pop(key, None)
            for p in self.params:
                del state[p][key]
        for key, value in list(new.items()):
            kept: Any = self.kept.get(key)
            if value is kept and key in self.kept and key not in self.stacks:
                continue
            tensors = isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor)
            if tensors and (value.shape, value.dtype, value.device) == (kept.shape, kept.dtype, kept.device):
                if value is not kept:
                    new[key] = kept.copy_(value)
                if key in self.stacks:
                    self.stacks[key].copy_(kept)
            else:
                new[key] = self._adopt(key, value, state)

    def _adopt(self, key: Any, value: Any, state: defaultdict[Any, Any]) -> Any:
        """Makes an entry of the run's state one of the parameters' states; returns what takes its place in the run's."""
        assert self.kept is not None
        values: Iterable[Any]
        self.stacks.pop(key, None)
        if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
            flat, views = self.storage.state(key, value)
            value, values = flat[self.span].copy_(value), views[self.members]
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            # A copy each: parameters may come to differ, and in the unfused optimizer none of them shares its counter.
            self.stacks[key] = value.detach().repeat(len(self.params), *(1,) * value.ndim)
            values = [self.stacks[key][i] for i in range(len(self.params))]
        elif isinstance(value, _PLAIN):
            values = itertools.repeat(value)
        else:
            raise RuntimeError(f"state[{key!r}] is neither elements' nor a whole parameter's: {type(value).__name__}")
        self.kept[key] = value
        for p, own in zip(self.params, values, strict=False):
            state[p][key] = own
        return value


def runs_of(storage: FlatStorage, state: defaultdict[Any, Any], has_gradient: set[int]) -> list[Run]:
    """Splits a storage into the longest runs whose parameters can be stepped together."""
    runs = []
    first, end = 0, len(storage.params)
    most = most_elements(storage.flat.device)
    signatures = [signature(p, state) if id(p) in has_gradient else None for p in storage.params]
    for last in range(1, end + 1):
        fits = last < end and storage.offsets[last + 1] - storage.offsets[first] <= most
        if fits and signatures[last] == signatures[first]:
            continue
        if signatures[first] is not None and last - first > 1:
            runs.append(Run(storage, first, last, state))
        first = last
    return runs


def most_elements(device: torch.device) -> int:
    """Elements that a run has at most: on a CPU, the results of an optimizer's many operations should not leave the cache."""
    return 1 << 17 if device.type == "cpu" else sys.maxsize


def signature(p: torch.Tensor, state: defaultdict[Any, Any]) -> Any:
    """What the states of two parameters must have in common to be flattened; None where a state cannot be."""
    if p not in state:
        return "new"
    signature: list[tuple[Any, ...]] = []
    for key, value in state[p].items():
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or (value.shape != p.shape and value.numel() != 1):
                return None
            # waits: once for each new state of an optimizer that is fused.
            scalar = None if value.shape == p.shape else (value.shape, value.item())
            signature.append((key, value.dtype, value.device, scalar))
        elif isinstance(value, _PLAIN):
            signature.append((key, type(value), value))
        else:
            return None
    return frozenset(signature)
