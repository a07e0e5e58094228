"""Counts the backward passes of one rank alone, of which nothing is exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class PassesAlone:
    """Counts backward passes that reach some of the given parameters, until it is closed or dropped.

    Attributes:
        enabled: False for passes that only accumulate, which do not count. A pass follows the value with which it begins.
        steps: how many there were.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Registers hooks on parameters."""
        self.enabled, self.steps = True, 0
        self._graph_task = -1
        # Hooks live as long as their parameters; they are not to keep this alive, nor stay behind.
        count = _counting(weakref.ref(self))
        self._hooks: list[Any] = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]
        self._end = weakref.finalize(self, _remove, self._hooks)

    def count(self) -> None:
        """Counts a pass with the first gradient that comes in it."""
        # A number that no two passes share.
        if (task := torch._C._current_graph_task_id()) != self._graph_task:
            self._graph_task = task
            self.steps += self.enabled

    def close(self) -> None:
        """Removes the hooks; calling it again does nothing."""
        self._end()


def _counting(passes: weakref.ref[PassesAlone]) -> Any:
    def count(_: torch.Tensor) -> None:
        if (found := passes()) is not None:
            found.count()

    return count


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
