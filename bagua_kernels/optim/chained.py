"""Several optimizers as one, for models whose parameters are not all trained alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, cast

import torch
from torch import Tensor


class ChainedOptimizer(torch.optim.Optimizer):
    """Optimizers of different parameters that step one after another, as one optimizer.

    Its groups and states are views of those of the optimizers, in order: what is written on either side arrives on the other.
    Its `state_dict` is that of one optimizer with all these groups.

    Attributes:
        optimizers: as given.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """Chains optimizers.

        Args:
            *optimizers: one or more, no two of them with the same parameter.

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
        # PyTorch's constructor checks a list of its own, and must not empty the optimizers' states and groups.
        self._starting: list[dict[str, Any]] | None = []
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._starting = None

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The states of all optimizers, by parameter; a view, which can be written.

        Setting it divides a mapping among the optimizers. An empty one restarts all of them.
        """
        return cast(defaultdict[Tensor, Any], _States(self.optimizers))

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if self._starting is None:
            parts: list[defaultdict[Any, Any]] = [defaultdict(dict) for _ in self.optimizers]
            for key, state in value.items():
                parts[_owner(self.optimizers, key)][key] = state
            for each, part in zip(self.optimizers, parts, strict=True):
                each.state = part

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order; a view. Setting it replaces each group by the one in its place."""
        found = _Groups(self.optimizers) if self._starting is None else self._starting
        return cast(list[dict[str, Any]], found)

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._starting is None:
            self.param_groups[:] = value
        else:
            self._starting = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses, because it is not known whose group it would be.

        Raises:
            TypeError: always.
        """
        if self._starting is None:
            raise TypeError("a chain takes no further groups: give them to one of its optimizers, whose groups it has")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Lets each optimizer forget the gradients, and how they were to be clipped."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

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
        numbers = {number for group in groups for number in group["params"]}
        # What belongs to no parameter is kept by the first one.
        general = {key: state for key, state in state_dict["state"].items() if key not in numbers}
        begin = 0
        for each in self.optimizers:
            end = begin + len(each.param_groups)
            each.load_state_dict(_part(state_dict, groups[begin:end], general))
            begin, general = end, {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        views = {name: state[name] for name in ("state", "param_groups") if name in state}
        super().__setstate__({name: value for name, value in state.items() if name not in views})
        for name, value in views.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies copy the optimizers, and chain them again."""
        return type(self), self.optimizers


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers, where they are."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> MutableMapping[Any, Any]:
        return self._optimizers[_owner(self._optimizers, key)].state

    def __getitem__(self, key: Any) -> Any:
        # Makes a missing one, as a defaultdict does.
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        # The mixin would look it up, which makes it; so would its `get` and `pop`.
        return any(key in each.state for each in self._optimizers)

    def get(self, key: Any, default: Any = None) -> Any:
        return self._of(key).get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._of(key).pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._of(key).setdefault(key, default)

    def clear(self) -> None:
        for each in self._optimizers:
            each.state.clear()

    def copy(self) -> defaultdict[Any, Any]:
        return defaultdict(dict, self)

    def __iter__(self) -> Iterator[Any]:
        return (key for each in self._optimizers for key in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def __repr__(self) -> str:
        return repr(self.copy())


class _Groups(MutableSequence[dict[str, Any]]):
    """The groups of several optimizers, where they are."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _all(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        groups = self._all()
        expected = len(groups)
        groups[index] = value
        if len(groups) != expected:
            raise ValueError(
                f"a chain of {expected} groups got {len(groups)}: add or remove groups of one of its optimizers"
            )
        begin = 0
        for each in self._optimizers:
            end = begin + len(each.param_groups)
            each.param_groups[:] = groups[begin:end]
            begin = end

    def __delitem__(self, index: Any) -> None:
        doomed = self._all()[index]
        doomed = doomed if isinstance(index, slice) else [doomed]
        for each in self._optimizers:
            each.param_groups[:] = [g for g in each.param_groups if not any(g is other for other in doomed)]

    def insert(self, index: int, value: dict[str, Any]) -> None:
        raise TypeError("a chain takes no further groups: give them to one of its optimizers, whose groups it has")

    def __len__(self) -> int:
        return sum(len(each.param_groups) for each in self._optimizers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._all())

    def __add__(self, other: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*self, *other]

    def __radd__(self, other: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, _Groups) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())


def _owner(optimizers: Sequence[torch.optim.Optimizer], key: Any) -> int:
    """The number of the optimizer whose state a key belongs to; the first one where it is no parameter of any."""
    for number, each in enumerate(optimizers):
        if key in each.state:
            return number
    for number, each in enumerate(optimizers):
        if any(key is parameter for group in each.param_groups for parameter in group["params"]):
            return number
    return 0


def _part(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]], general: Mapping[Any, Any]) -> dict[str, Any]:
    """The `state_dict` of some groups, whose parameters are numbered from 0 in it, with states of no parameter."""
    numbers = {old: new for new, old in enumerate(number for group in groups for number in group["params"])}
    own = {numbers[old]: state for old, state in state_dict["state"].items() if old in numbers}
    return {
        "state": {**own, **general},
        "param_groups": [{**group, "params": [numbers[old] for old in group["params"]]} for group in groups],
    }
