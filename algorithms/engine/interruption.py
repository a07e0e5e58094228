"""What follows from a backward pass that broke off while gradients were exchanged: nothing goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua_kernels.errors import follow_up

_CURE = (
    "ranks no longer agree: restart from a checkpoint, or close() this wrapper, call comm.shutdown() and comm.init(), wrap "
    "the module anew and load a checkpoint"
)


class Interruption:
    """Drops gradients once an exchange has failed, and refuses optimizers' steps from then on.

    Until then it costs nothing: only `happen` registers a hook with PyTorch's optimizers.

    Attributes:
        happened: True once an exchange was interrupted.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Prepares for parameters whose gradients are exchanged."""
        self.happened = False
        # Reentrant, since a collected `Ending` may call `happen` on any thread, at any time.
        self._lock = threading.RLock()
        self._parameters = list(parameters)
        self._known = set(self._parameters)
        self._reason = ""
        self._error: BaseException | None = None
        self._handle: Any = None

    def happen(self, error: BaseException | None, updated: Sequence[str]) -> None:
        """Drops all gradients; the first call counts.

        Args:
            error: what went wrong, which gets a note; None if another exception ended backward.
            updated: names of the parameters that were updated in this backward pass already.
        """
        with self._lock:
            if self.happened:
                return
            self.happened = True
            for parameter in self._parameters:
                parameter.grad = None
        half = ""
        if updated:
            half = (
                f"; {len(updated)} of {len(self._parameters)} parameters have been updated in that pass ({updated[0]} first), "
                "the others have not"
            )
        self._error = error
        what = "backward ended in an exception" if error is None else f"{type(error).__name__}: {error}"
        self._reason = (
            f"the last backward pass was interrupted while gradients were exchanged ({what}); its gradients were dropped"
            f"{half}; {_CURE}"
        )
        if error is not None:
            error.add_note(f"The gradients of this backward pass were dropped{half}; {_CURE}.")
        self._handle = register_optimizer_step_pre_hook(_refusal(weakref.ref(self)))
        weakref.finalize(self, self._handle.remove)

    def give(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Sets a parameter's gradient from any thread, unless gradients were dropped before."""
        with self._lock:
            if not self.happened:
                parameter.grad = gradient

    def check(self) -> None:
        """Raises if an exchange was interrupted.

        Raises:
            RuntimeError: other ranks may be waiting for this one, and their next collective would meet another of ours. It is
                an error of the kind that interrupted the exchange, with the same ranks, where that was a `CommunicationError`.
        """
        if self.happened:
            raise follow_up(self._error, self._reason) if self._error is not None else RuntimeError(self._reason)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """As `check`, for an optimizer that has one of the parameters."""
        if any(p in self._known for group in optimizer.param_groups for p in group["params"]):
            self.check()

    def remove(self) -> None:
        """Refuses no optimizer's step from now on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _refusal(interruption: weakref.ref[Interruption]) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = interruption()
        if alive is not None:
            alive.check_step(optimizer)

    return hook


class Interruptible(Protocol):
    """What has a backward pass under way."""

    def end(self) -> None:
        """Called when backward has ended."""

    def interrupted(self, number: int) -> None:
        """Called when the backward pass of a number has ended in an exception."""


class Ending:
    """A callback for the end of backward, which PyTorch drops uncalled if backward ends in an exception."""

    def __init__(self, of: Interruptible, number: int) -> None:
        self._of: weakref.ref[Interruptible] | None = weakref.ref(of)
        self._number = number

    def __call__(self) -> None:
        """Ends the backward pass."""
        alive, self._of = None if self._of is None else self._of(), None
        if alive is not None:
            alive.end()

    def __del__(self) -> None:
        alive = None if self._of is None else self._of()
        if alive is not None:
            alive.interrupted(self._number)
