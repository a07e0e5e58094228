"""A clock that moves only when a test moves it."""

from __future__ import annotations

import threading


class VirtualClock:
    """Takes the place of the module `time` in a module under test; functions of threads share it.

    Attributes:
        now: seconds since it was made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """Returns the time, as `perf_counter` and `time` do."""
        return self.now

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        """Moves the clock instead of waiting."""
        with self._lock:
            self.now += seconds
