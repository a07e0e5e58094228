"""Several optimizers as one, for models whose parameters are not all trained alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class ChainedOptimizer(torch.optim.Optimizer):
    """Optimizers of different parameters that step one after another, as one optimizer.

    Its groups are those of the optimizers, in order: what a scheduler writes into them arrives. Its `state_dict` is that of one
    optimizer with all these groups.

    Attributes:
        optimizers: as given.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """Chains optimizers.

        Args:
            *optimizers: one or more, no two of them with the same parameter. Give each all its groups before.

        Raises:
            TypeError: one is something else.
            ValueError: there are none, or two have the same parameter.
        """
        for each in optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise TypeError(f"expected optimizers, got {each!r}")
        if not optimizers:
            raise ValueError("expected one optimizer or more, got none")
        self.optimizers = optimizers
        self._chained = False
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._chained = True

    # The states stay where they are: loading a checkpoint gives each optimizer a new dictionary.
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The states of all optimizers, by parameter."""
        found = {parameter: state for each in self.optimizers for parameter, state in each.state.items()}
        return defaultdict(dict, found)

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if value:
            raise AttributeError("the states belong to the optimizers of the chain: set theirs")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses, because it is not known whose group it would be.

        Raises:
            TypeError: always.
        """
        if self._chained:
            raise TypeError(
                "a chain takes no further groups: give them to one of its optimizers before they are chained"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step of each optimizer.

        Args:
            closure: computes the loss and its gradients, once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives each optimizer its part of what `state_dict` returned.

        Raises:
            ValueError: the number of groups, or of parameters in one, differs.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} groups of parameters, expected {len(self.param_groups)}")
        begin = 0
        for each in self.optimizers:
            end = begin + len(each.param_groups)
            each.load_state_dict(_part(state_dict, groups[begin:end]))
            begin = end
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies copy the optimizers, and chain them again."""
        return type(self), self.optimizers


def _part(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `state_dict` of some groups, whose parameters are numbered from 0 in it."""
    numbers = {old: new for new, old in enumerate(number for group in groups for number in group["params"])}
    return {
        "state": {numbers[old]: state for old, state in state_dict["state"].items() if old in numbers},
        "param_groups": [{**group, "params": [numbers[old] for old in group["params"]]} for group in groups],
    }
