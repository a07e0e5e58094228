"""A notice that this process is to leave the job: who gave it, and until when a round may still be finished."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

GRACE = 10.0  # seconds: launchers end a process some 30 s after their first signal
_SIGNALS = tuple(found for name in ("SIGTERM", "SIGUSR1") if (found := getattr(signal, name, None)) is not None)


class Notice:
    """What asks this process to leave the job, a signal or the program.

    Attributes:
        reason: who asked; empty if nobody has.
    """

    def __init__(self) -> None:
        """Was not asked yet."""
        self.reason = ""
        self._until = 0.0
        self._handled: list[signal.Signals] = []

    def give(self, reason: str, seconds: float = GRACE) -> None:
        """Asks this process to leave, at the end of its round or after so many seconds; a second notice changes nothing."""
        if not self.reason:
            self._until = time.monotonic() + seconds
            self.reason = reason

    @property
    def is_urgent(self) -> bool:
        """True once the time for the end of a round has passed."""
        return bool(self.reason) and time.monotonic() >= self._until

    def listen(self) -> None:
        """Takes signals that launchers send before they end a process, unless the program takes them itself.

        Slurm and Kubernetes send SIGTERM, and Slurm what `--signal` names. A second signal ends the process at once, as ever.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may
        for each in _SIGNALS:
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, self._hear)
                self._handled.append(each)

    def close(self) -> None:
        """Gives back the signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for each in self._handled:
            if signal.getsignal(each) == self._hear:
                signal.signal(each, signal.SIG_DFL)
        self._handled = []

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.give(f"it got {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
