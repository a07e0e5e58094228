"""The launches of a fused step, made anew where an optimizer's tensors have changed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_kernels import knobs
from bagua_kernels.launchers.multitensor import has_float64
from bagua_kernels.optim.step.entry import Entry
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.shards import is_plain, is_sharded, local, shard_of_gradient, shard_of_state
from bagua_kernels.optim.step.states import States
from bagua_kernels.optim.step.strides import overlaps_itself, turns
from bagua_kernels.optim.step.update import CannotFuseError, Group


class Launches:
    """The launches of one step, and what they were made from.

    Args:
        optimizer: whose step.
        params: the parameters that the step is of; all by default.

    Attributes:
        each: in the order in which they must run.
        params: the parameters that they can update, but those that autograd does not watch.
    """

    def __init__(self, optimizer: States, params: Sequence[Tensor] | None = None) -> None:
        self._groups = list(optimizer.param_groups)
        # The tensors are kept beside their ids, which would be given to others if they were freed.
        self._chosen = None if params is None else {id(p): p for p in params}
        self._all = [p for group in self._groups for p in self._of(group)]
        if len({id(p) for p in self._all}) != len(self._all):
            raise CannotFuseError("a parameter is listed twice")
        entries = list(self._entries(optimizer))
        self._updates = [optimizer._update(group) for group in self._groups]
        self._inactive = [p for p in self._all if p.grad is None]
        self._states = self._states_of(optimizer)
        sets: dict[Any, list[Entry]] = {}
        for turn, entry in zip(turns([e.tensors[0] for e in entries]), entries, strict=True):
            sets.setdefault((turn, entry.key()), []).append(entry)
        ordered = sorted(sets, key=lambda key: key[0])
        self.each = [Launch(sets[key], by_address=optimizer._by_address) for key in ordered]
        self.params = [e.parameter for e in entries if not e.parameter.is_inference()]

    def _of(self, group: Group) -> list[Tensor]:
        params: list[Tensor] = group["params"]
        return params if self._chosen is None else [p for p in params if id(p) in self._chosen]

    def _states_of(self, optimizer: States) -> list[Any]:
        if self._chosen is None:
            return list(optimizer.state.values())
        return [optimizer.state.get(p) for p in self._all]

    def _entries(self, optimizer: States) -> Iterator[Entry]:
        position = 0
        for group in self._groups:
            fresh = optimizer._prepare(group if self._chosen is None else {**group, "params": self._of(group)})
            update = optimizer._update(group)
            for parameter in group["params"]:
                chosen = self._chosen is None or id(parameter) in self._chosen
                if chosen and parameter.grad is not None:
                    extras, stochastic = optimizer._extra_columns(parameter)
                    names = (*update.states, *extras)
                    state = optimizer.state[parameter] if names or update.counters or stochastic else {}
                    if optimizer._whole and is_sharded(parameter):
                        raise CannotFuseError(f"it needs {optimizer._whole}, and a parameter is sharded over ranks")
                    own = (shard_of_state(parameter, state[name]) for name in names)
                    tensors = (local(parameter), shard_of_gradient(parameter, parameter.grad), *own)
                    check(group, tensors)
                    yield Entry(
                        position, parameter, state, group, update, extras, stochastic, id(parameter) in fresh, tensors
                    )
                position += 1

    def matches(self, optimizer: States) -> bool:
        """True if the launches are still right; they then have this step's gradients."""
        groups = optimizer.param_groups
        return (
            identical(groups, self._groups)
            and identical([p for group in groups for p in self._of(group)], self._all)
            and [optimizer._update(group) for group in groups] == self._updates
            and not any(p.grad is not None for p in self._inactive)
            and identical(self._states_of(optimizer), self._states)
            and all(launch.take() for launch in self.each)
        )

    def updated(self) -> list[Tensor]:
        """The parameters that this step updates, but those that autograd does not watch."""
        if all(launch.missing is None for launch in self.each):
            return self.params
        return [p for p in self.params if p.grad is not None]

    def end(self) -> None:
        """Drops the references to gradients and states."""
        for launch in self.each:
            launch.end()


def identical(some: Collection[Any], others: Collection[Any]) -> bool:
    """True if both have the very same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def check(group: Group, tensors: Sequence[Tensor]) -> None:
    """Raises unless a kernel can work on the tensors of one parameter.

    Raises:
        CannotFuseError: PyTorch can, or has an error of its own.
        RuntimeError: elements of the parameter share memory, or a tensor has another shape or device.
    """
    parameter = tensors[0]
    for tensor in tensors:
        if tensor.is_sparse or tensor.layout != torch.strided:
            raise CannotFuseError(f"a gradient is {tensor.layout}")
        if not is_plain(tensor):
            raise CannotFuseError(f"{type(tensor).__name__} has operations of its own")
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise CannotFuseError("a tensor is not in memory as it is: a lazy conjugate, negation or zero")
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type not in ("cpu", "cuda"):
            raise CannotFuseError(f"there are no kernels for {tensor.dtype} on {tensor.device}")
        if tensor.shape != parameter.shape or tensor.device != parameter.device:
            raise RuntimeError(
                f"a gradient or state has shape {tuple(tensor.shape)} on {tensor.device}, its parameter "
                f"{tuple(parameter.shape)} on {parameter.device}"
            )
    if parameter.dtype in (torch.float64, torch.complex128) and not has_float64(parameter.device):
        raise CannotFuseError(
            f"Triton has no correctly rounded {parameter.dtype}, which {knobs.BACKEND.variable}=numba_cuda has"
        )
    if group.get("capturable") and not group.get("fused") and parameter.device.type == "cpu":
        raise CannotFuseError("capturable=True is for parameters on a GPU")
    if overlaps_itself(parameter):
        raise RuntimeError(
            f"elements of a parameter of shape {tuple(parameter.shape)} and stride {parameter.stride()} share memory; clone it"
        )
