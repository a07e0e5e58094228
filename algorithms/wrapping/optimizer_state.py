"""Loads a state into an optimizer without replacing its groups, which schedules may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def put_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a `state_dict`; the optimizer's groups, their list and tensors of options stay the objects that they are.

    `load_state_dict` makes new groups. A schedule that holds an earlier group, or its tensor `lr`, would lose the optimizer.

    Args:
        optimizer: that loads it; one that consists of others, or is around another, keeps theirs too.
        state: of an optimizer with the same groups.
    """
    held = [(each, each.param_groups, list(each.param_groups)) for each in _all_of(optimizer)]
    optimizer.load_state_dict(state)
    for each, container, groups in held:
        if len(groups) != len(each.param_groups):
            continue
        for group, loaded in zip(groups, each.param_groups, strict=True):
            if group is not loaded:
                _write(group, loaded)
        container[:] = groups
        # Where it is computed from the groups of others, those have theirs again.
        if "param_groups" in vars(each):
            each.param_groups = container


def _all_of(optimizer: Any) -> list[Any]:
    """An optimizer with groups, and before it those of which it consists."""
    inner = [*(getattr(optimizer, "optimizers", None) or ()), getattr(optimizer, "optimizer", None)]
    found = [one for each in inner if isinstance(each, torch.optim.Optimizer) for one in _all_of(each)]
    return [*found, optimizer] if hasattr(optimizer, "param_groups") else found


def _write(group: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Gives a group the options of another."""
    for name in [name for name in group if name not in loaded]:
        del group[name]
    for name, value in loaded.items():
        if name != "params":
            group[name] = _written(group.get(name), value)


@torch.no_grad()
def _written(held: Any, value: Any) -> Any:
    """Returns a value, in the tensors that exist where they can have it."""
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
        same = held.shape == value.shape and held.dtype == value.dtype
        return held.copy_(value) if same else value
    if type(held) is type(value) and type(held) in (list, tuple) and len(held) == len(value):
        return type(held)(map(_written, held, value))
    return value


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.nn.Parameter, str], torch.Tensor]:
    """Returns the tensors that an optimizer keeps for its parameters, by parameter and key, in the same order on all ranks."""
    return {
        (parameter, key): value
        for each in _all_of(optimizer)
        for group in each.param_groups
        for parameter in group["params"]
        for key, value in sorted(each.state.get(parameter, {}).items(), key=lambda pair: str(pair[0]))
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
