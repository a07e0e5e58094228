"""The loss scale of a backward pass."""

from __future__ import annotations

import threading

import torch


class LossScale:
    """The scale that a `GradScaler` has in one backward pass, which is read from the device at most once.

    Communication threads read it: the first one of a pass waits for the device, and the others get the same number.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        """Reads nothing yet."""
        self._scaler = scaler
        self._lock = threading.Lock()
        self._value: float | None = None

    def get(self) -> float:
        """Returns the scale. `GradScaler.update` must not be called between the first call and the end of the pass."""
        with self._lock:
            if self._value is None:
                # waits: once a step, on a communication thread.
                self._value = float(self._scaler.get_scale())
            return self._value
