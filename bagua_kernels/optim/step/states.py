"""The states of a fused optimizer: PyTorch's own, and those that its options add; how they are made, saved and loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, MASTER
from bagua_kernels.optim.step.entry import DRAWS
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update, counter_dtype

HALVES = (torch.bfloat16, torch.float16)


class States(Optimizer):
    """Definitions of a subclass about its groups, and the states that follow from them."""

    # True if a step needs no more of the gradients than where they lie.
    _by_address = True
    # What of a parameter must not be spread over ranks.
    _whole: str | None = None
    # The rule and states of every group, unless `_update` is overridden.
    _rule: Update
    _made: list[tuple[Tensor, str]]
    _extras: Extras = Extras()

    def _update(self, group: Group) -> Update:
        """The rule and states of a group."""
        return self._rule

    def _advance(self, group: Group, counters: Counters) -> Mapping[str, Any]:
        """Moves the counters to this step, and returns the rule's scalars by the names of its parameters.

        Args:
            group: options, as numbers; on a GPU those that are tensors stay tensors.
            counters: to be replaced by those of this step.
        """
        raise NotImplementedError

    def _prepare(self, group: Group) -> set[int]:
        """Makes missing states of a group's parameters that have a gradient, and returns the `id`s of those that were missing."""
        update = self._update(group)
        wanted = [name for name in (*update.states, *update.counters) if not name.startswith("_")]
        active = [p for p in group["params"] if p.grad is not None]
        fresh = {id(p) for p in active if any(self.state.get(p, {}).get(name) is None for name in wanted)}
        make = getattr(super(), "_init_group", None)
        if make is not None:
            # PyTorch's own, with its errors; the lists that it fills follow the group.
            make(group, *([] for _ in range(len(inspect.signature(make).parameters) - 1)))
        for p in active:
            if id(p) in fresh:
                for name in update.states:
                    self._make(p, name, torch.zeros_like, p, memory_format=torch.preserve_format)
                for name in update.counters:
                    if not name.startswith("_"):
                        self._make(p, name, torch.zeros, (), dtype=counter_dtype())
            extras, stochastic = self._extra_columns(p)
            for name in extras:
                self._make(p, name, extra_state, name, p)
            if stochastic:
                device = p.device if group.get("fused") or group.get("capturable") else "cpu"
                self._make(p, DRAWS, torch.zeros, (), dtype=torch.float32, device=device)
        return fresh

    def _make(self, parameter: Tensor, name: str, make: Callable[..., Tensor], *given: Any, **options: Any) -> None:
        """Creates a missing state entry; `_unmake` removes it if the step fails."""
        state = self.state[parameter]
        if state.get(name) is None:
            state[name] = make(*given, **options)
            self._made.append((parameter, name))

    def _unmake(self) -> None:
        """Removes the states that were made for a step that was not taken."""
        for parameter, name in self._made:
            del self.state[parameter][name]
            if not self.state[parameter]:
                del self.state[parameter]
        self._made = []

    def _extra_columns(self, parameter: Tensor) -> tuple[tuple[str, ...], bool]:
        """The names of the extra states of a parameter, and whether it is rounded at random."""
        precision = self._extras.precision if parameter.dtype in HALVES else "nearest"
        names = {"master": (MASTER,), "kahan": (COMPENSATION,)}.get(precision, ())
        if self._extras.average is not None:
            if parameter.is_complex():
                raise TypeError(f"a running mean is kept of real parameters only, got {parameter.dtype}")
            names = (*names, AVERAGE)
        return names, precision == "stochastic"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_extras": self._extras}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, here or in `torch.optim`.

        Args:
            state_dict: of this optimizer, or of PyTorch's of the same name.
        """
        given: list[dict[str, Any]] = []
        # The last hook before sees what other hooks have made of the argument, the first one after comes before theirs.
        before = self.register_load_state_dict_pre_hook(lambda _, state_dict: given.append(state_dict))
        after = self.register_load_state_dict_post_hook(lambda _: self._load_wide(given[0]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _load_wide(self, state_dict: dict[str, Any]) -> None:
        """Loads what PyTorch has cast to the parameters' dtype, which these states are there to be wider than."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            for name in (MASTER, AVERAGE, DRAWS):
                value = state_dict["state"].get(index, {}).get(name)
                if value is not None:
                    self.state[p][name] = value.to(value.device if name == DRAWS else p.device, copy=True)


def extra_state(name: str, parameter: Tensor) -> Tensor:
    """An extra state before the first step."""
    if name == COMPENSATION:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    wide = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    return parameter.detach().to(wide, copy=True, memory_format=torch.preserve_format)
