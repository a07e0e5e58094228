"""Where ranks that are threads take time and waiting from: a real clock, or in tests a `Schedule`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Condition(Protocol):
    """A re-entrant lock with waiting: the methods of `threading.Condition` that communicators use."""

    def acquire(self) -> bool:
        """Waits for the lock and takes it; returns True."""

    def release(self) -> None:
        """Releases the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock until `notify_all` is called; returns False if the seconds of `timeout` ran out before."""

    def notify_all(self) -> None:
        """Wakes all threads that wait; the caller holds the lock."""


class Clock(Protocol):
    """Time, waiting, and threads that wait by this clock."""

    def now(self) -> float:
        """Returns seconds since any fixed moment; they never go back."""

    def condition(self) -> Condition:
        """Makes a condition whose timeouts run by this clock."""

    def latency(self) -> float:
        """Returns the seconds after which a letter that is posted now arrives."""

    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        """Makes a daemon thread that may wait by this clock; `start` starts it."""


class RealClock:
    """`time.monotonic`, with Python's own conditions and threads."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def condition(self) -> Condition:
        """See `Clock.condition`."""
        return threading.Condition()

    def latency(self) -> float:
        """See `Clock.latency`; between real threads a letter arrives at once."""
        return 0.0

    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        """See `Clock.thread`."""
        return threading.Thread(target=target, name=name, daemon=True)
