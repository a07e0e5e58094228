"""The points of a training loop at which a model algorithm acts, taken from hooks of the module and of the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.models.scaled_steps import ScaledSteps, watch


class Listener(Protocol):
    """What is called at the points."""

    def on_forward(self, training: bool) -> None: ...  # noqa: D102
    def on_step_begin(self) -> None: ...  # noqa: D102
    def on_step_end(self) -> None: ...  # noqa: D102
    def on_state_dict(self) -> None: ...  # noqa: D102
    def on_load(self) -> None: ...  # noqa: D102


class Points:
    """Calls a listener before a module's forward passes and states, after its loads, and around an optimizer's steps.

    A forward pass inside a step, as `LBFGS` makes them in its closure, is no point. The hooks hold the listener weakly. Those
    of a copy of the module call nobody.

    A `GradScaler` leaves out the step of an optimizer of PyTorch if a gradient overflowed on this rank. With `scaler` given,
    such a step is counted as one that changed nothing, at once. Optimizers of this package are called in any case.

    Attributes:
        counts_left_out: True, by which optimizers of this package know that steps that are left out are for these hooks, too.
        optimizer: whose steps are points.
        taken: the number of its steps so far.
    """

    counts_left_out = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        listener: Listener,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Registers the hooks."""
        self._listener: Callable[[], Listener | None] = weakref.ref(listener)
        self.optimizer = optimizer
        self.taken = 0
        self._stepping = False
        self._scaled: ScaledSteps | None = None if scaler is None else watch(scaler, self)
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_state_dict_pre_hook(self._before_state),
            module.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies and pickles of the module have in its place."""
        return _of_nobody, ()

    def close(self) -> None:
        """Removes the hooks; calling it again does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._scaled is not None:
            self._scaled.remove(self)
            self._scaled = None

    @torch._disable_dynamo  # type: ignore[attr-defined]  # messages cannot be traced
    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        listener = self._listener()
        if listener is not None and not self._stepping:
            listener.on_forward(module.training and torch.is_grad_enabled())

    def _before_state(self, *_: Any) -> None:
        listener = self._listener()
        if listener is not None:
            listener.on_state_dict()

    def _after_load(self, *_: Any) -> None:
        listener = self._listener()
        if listener is not None:
            listener.on_load()

    def _before_step(self, *_: Any) -> None:
        listener = self._listener()
        if listener is not None:
            # A step that raised has no end.
            self._stepping = False
            listener.on_step_begin()
            self._stepping = True

    def _after_step(self, *_: Any) -> None:
        listener = self._listener()
        self._stepping = False
        self.taken += 1
        if listener is not None:
            listener.on_step_end()

    def left_out(self) -> None:
        """See `StepWatch.left_out`."""
        listener = self._listener()
        if listener is not None:
            listener.on_step_begin()
            listener.on_step_end()


def _of_nobody() -> Points:
    """Returns the points of a copy of a module, whose hooks call nobody."""
    points = Points.__new__(Points)
    points._listener, points._stepping = _nobody, False
    return points


def _nobody() -> None:
    """The listener of a copy's points."""


def is_left_out(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True in a step of an optimizer of this package that a `GradScaler` has it leave out; waits for the device."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def misfit(optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.nn.Parameter]) -> str:
    """Returns why an optimizer does not fit a module; empty if it has the module's trainable parameters and no others.

    Steps of another optimizer would be lost, for exchanges belong to this one's.

    Args:
        optimizer: whose steps exchanges belong to.
        trained: the module's trainable parameters, by name.
    """
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if lacking := [name for name, parameter in trained.items() if parameter not in stepped]:
        return (
            f"the optimizer does not have the trainable parameters {lacking[:3]}: give all to one optimizer, or freeze those "
            "that are not trained"
        )
    if any(parameter.requires_grad for parameter in stepped - set(trained.values())):
        return (
            "the optimizer has parameters that the module does not have, and that would not be exchanged: wrap one module "
            "that holds all"
        )
    return ""
