"""States of modules and optimizers: copies, and means over ranks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.exchanges.vectors import Named, check_trained, mean_in_order, mean_of
from bagua_kernels.algorithms.wrapping.buffers import RUNNING, averaged_names
from bagua_kernels.algorithms.wrapping.equal import in_common
from bagua_kernels.algorithms.wrapping.replicas import average
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.comm.reduction import reduce_in_order

_COUNTERS = ("step",)  # of a parameter's state: numbers of updates are no vectors


def module_state(module: torch.nn.Module, *, copies: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """Returns a module's trainable `parameters` and its `buffers`, by name.

    Args:
        module: of which they are.
        copies: False for tensors in the module's own memory.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    named: dict[str, Mapping[str, torch.Tensor]] = {"parameters": trained, "buffers": dict(module.named_buffers())}
    return {
        key: {name: t.detach().clone() if copies else t.detach() for name, t in tensors.items()}
        for key, tensors in named.items()
    }


@torch.no_grad()
def put_module_state(module: torch.nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
    """Writes what `module_state` returned on one rank, or the mean of several, into a module.

    Of buffers only running statistics are averaged, as by `ModelAlgorithm.synchronize`; the others are those of the first state.

    Raises:
        ValueError: the names or a shape differ.
    """
    named = mean_of([{"parameters": one["parameters"]} for one in states])
    named["buffers"] = _mean_buffers([one["buffers"] for one in states], averaged_names(module, RUNNING))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    check_trained(named.get("parameters", {}), trained)
    buffers = dict(module.named_buffers())
    for key, tensors in (("parameters", trained), ("buffers", buffers)):
        for name, values in named.get(key, {}).items():
            if name not in tensors or values.shape != tensors[name].shape:
                found = tuple(tensors[name].shape) if name in tensors else "none"
                raise ValueError(f"the state of {name!r} has shape {tuple(values.shape)}, the module's is {found}")
            tensors[name].data.copy_(values)


def _mean_buffers(several: Sequence[Named], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Returns the first ones, with the means of those that are named; a mean of equal bits has these bits."""
    found = dict(several[0])
    for name in found.keys() & names:
        first = found[name].contiguous()
        others = torch.stack([one[name].contiguous() for one in several])
        mean = reduce_in_order(others.double(), ReduceOp.AVG).to(first.dtype)
        each = others.view(len(several), first.numel(), 1).view(torch.uint8)
        same = (each == each[0]).all(2).all(0).view(first.shape)
        found[name] = torch.where(same, first, mean)
    return found


def average_states(state: Mapping[str, Any], communicator: Communicator) -> None:
    """Replaces the tensors of floating point in an optimizer's `state_dict` by their means over all ranks; collective.

    Counters of steps and options stay this rank's. A tensor that only some ranks have, since only they have used its
    parameter, stays as it is.
    """
    mine = _tensors(state)
    average(
        [mine[key] for key in in_common({key: f"{t.dtype} {tuple(t.shape)}" for key, t in mine.items()}, communicator)],
        communicator,
    )


def load_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean of the `state_dict`s of several ranks; one rank's own is returned as it is."""
    loaded = copy.deepcopy(dict(states[0]))
    if len(states) > 1:
        others = [_tensors(state) for state in states]
        for key, tensor in _tensors(loaded).items():
            tensor.copy_(mean_in_order([one[key] for one in others if key in one]))
    return loaded


def _tensors(state: Mapping[str, Any]) -> dict[tuple[Any, str], torch.Tensor]:
    return {
        (parameter, name): value
        for parameter, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in _COUNTERS
    }
