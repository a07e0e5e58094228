"""What wants to know when backward passes end, and how long they have taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from bagua_kernels.comm import Communicator


class Listener(Protocol):
    """Compares backward passes, and may have the next ones exchanged otherwise."""

    @property
    def compares(self) -> bool:
        """True while seconds of passes are compared, so that they have to include the work of a GPU."""

    def pass_ended(self, step: int, seconds: float, communicator: Communicator) -> None:
        """Called on all ranks after a backward pass, when no exchange is under way; collective.

        Args:
            step: number of the pass.
            seconds: from its first gradient to the end of its last exchange.
            communicator: of all ranks.
        """


class PassTimer:
    """Measures backward passes for a listener.

    Attributes:
        clock: returns seconds since any fixed time.
    """

    def __init__(self, listener: Listener | None, device: torch.device) -> None:
        """Measures work on a device; without a listener nothing is compared."""
        self.clock: Callable[[], float] = time.perf_counter
        self._listener, self._device = listener, device
        self._begun = 0.0

    def begin(self) -> None:
        """Called at the first gradient of a pass."""
        self._begun = self._now()

    def taken(self) -> float:
        """Returns seconds since the first gradient."""
        return self._now() - self._begun

    def _now(self) -> float:
        if self._listener is not None and self._listener.compares and self._device.type == "cuda":
            # Without, the exchanges of a GPU would seem to take as long as their launches.
            torch.cuda.synchronize(self._device)
        return self.clock()
