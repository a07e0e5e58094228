"""How an optimizer's groups are updated, and why a step may have to be left to PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.rules.optimizers import ElementwiseRule

Group = dict[str, Any]


def counter_dtype() -> torch.dtype:
    """The dtype of counters that `torch.optim` would make now: float64 if that is the default, else float32.

    Half precision would count to 256 or 2048 only.
    """
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class CannotFuseError(Exception):
    """Why a step must be left to PyTorch."""


def scalar_names(rule: ElementwiseRule) -> tuple[str, ...]:
    """The names of a rule's parameters behind its arrays."""
    code = rule.function.__code__
    return code.co_varnames[rule.arrays : code.co_argcount]


@dataclass(frozen=True)
class Update:
    """How an optimizer updates the parameters of a group.

    Attributes:
        rule: its arrays are the parameter, the gradient and the states.
        states: names of the states of the parameter's shape, in the rule's order.
        counters: names of the states of one number. Those that begin with an underscore are not in the optimizer's state.
            They are 1 for a parameter whose states were made for this step, else 0.
    """

    rule: ElementwiseRule
    states: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the rule's scalars, in its order."""
        return scalar_names(self.rule)
