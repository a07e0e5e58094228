"""A second optimizer over the same parameters and states, with gradients and options of its own."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from bagua_kernels.optim.step.fused import Fused


class Twin:
    """Lets steps be taken while the training loop reads and changes the optimizer.

    A loop sets `grad` to None and schedules change the learning rate when steps may still be under way. The twin's parameters
    share memory and version with the original's but not `grad`, its states are the original's own, and its options are what the
    original's were when `begin` was called.

    Attributes:
        optimizer: of the original's class.
        parameters: what stands for each of the original's.
    """

    def __init__(self, original: Fused) -> None:
        """Takes over parameters, states and options.

        Args:
            original: the optimizer.
        """
        self._original = original
        self.optimizer: Fused = object.__new__(type(original))
        vars(self.optimizer).update(vars(original))
        vars(self.optimizer).update(
            param_groups=[], state=defaultdict(dict), _plan=None, _made=[], _clipping=None, _encoded=None
        )
        self.parameters: dict[Tensor, Tensor] = {}
        self.begin()

    def begin(self) -> bool:
        """Takes over what the original's options and states are now; returns whether the same tensors stand for parameters.

        No step of the twin may be under way.
        """
        groups, own = self._original.param_groups, self.optimizer.param_groups
        before = self.parameters
        self.parameters = {p: _alias(p, before.get(p)) for group in groups for p in group["params"]}
        if len(own) != len(groups):
            own[:] = [{} for _ in groups]
        for options, group in zip(own, groups, strict=True):
            options.clear()
            # Schedules may write to a learning rate that is a tensor.
            options.update({name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items()})
            options["params"] = [self.parameters[p] for p in group["params"]]
        states = self._original.state
        self.optimizer.state = defaultdict(
            dict, {self.parameters[p]: states[p] for p in self.parameters if p in states}
        )
        return len(before) == len(self.parameters) and all(before.get(p) is a for p, a in self.parameters.items())

    def end(self) -> None:
        """Gives the original the states that the twin's steps have made."""
        for parameter, alias in self.parameters.items():
            state = self.optimizer.state.get(alias)
            if state and self._original.state.get(parameter) is not state:
                self._original.state[parameter] = state


def _alias(parameter: Tensor, known: Tensor | None) -> Tensor:
    """Another tensor with a parameter's memory: the one that is known, if it still has it."""
    if known is not None and known.is_set_to(parameter) and known.dtype == parameter.dtype:
        return known
    with torch.no_grad():
        return parameter.detach()
