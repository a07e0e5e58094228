"""Steps of an optimizer that a `GradScaler` leaves out."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch


class StepWatch(Protocol):
    """Counts the steps of one optimizer, and those that were left out."""

    optimizer: torch.optim.Optimizer
    taken: int

    def left_out(self) -> None: ...  # noqa: D102


class ScaledSteps:
    """Takes the place of a scaler's `step`, and reports at once each step that the scaler leaves out.

    A scaler's scale would not do: it belongs to all optimizers of the scaler, and changes when a checkpoint is loaded.

    One object serves all that watch a scaler. Copies and pickles of the scaler have its own `step` again.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        """Takes the place of `scaler.step`; see `watch`."""
        self._scaler = scaler
        # Another library may have put a function of its own there.
        self._inner: Callable[..., Any] = scaler.step
        self._replaced = "step" in vars(scaler)
        self._watches: list[StepWatch] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Does what the scaler's `step` does."""
        watches = [watch for watch in self._watches if watch.optimizer is optimizer]
        taken = [watch.taken for watch in watches]
        result = self._inner(optimizer, *args, **kwargs)
        for watch, before in zip(watches, taken, strict=True):
            if watch.taken == before:
                watch.left_out()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies and pickles of the scaler have in its place."""
        return _own_step, (self._scaler,)

    def remove(self, watch: StepWatch) -> None:
        """Reports nothing more to it; the last one gives the scaler its own `step` back."""
        self._watches = [each for each in self._watches if each is not watch]
        # A function that another library has put around this one still needs it.
        if not self._watches and vars(self._scaler).get("step") is self:
            if self._replaced:
                self._scaler.step = self._inner
            else:
                del self._scaler.step


def _own_step(scaler: torch.amp.GradScaler) -> Callable[..., Any]:
    return types.MethodType(type(scaler).step, scaler)


def watch(scaler: torch.amp.GradScaler, watch: StepWatch) -> ScaledSteps:
    """Makes a watch count the steps that a scaler leaves out of its optimizer, until `remove` of the result."""
    steps = vars(scaler).get("step")
    if not isinstance(steps, ScaledSteps):
        steps = ScaledSteps(scaler)
        scaler.step = steps  # type: ignore[method-assign]
    steps._watches.append(watch)
    return steps
