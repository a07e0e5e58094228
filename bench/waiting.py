"""Waits of benchmarks for processes that they have started."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE = 0.02  # seconds between two looks


def until(condition: Callable[[], object], seconds: float, output: Callable[[], str]) -> None:
    """Waits until a condition holds.

    Args:
        condition: called again and again.
        seconds: at most.
        output: returns what the processes have printed, for the error.

    Raises:
        RuntimeError: it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the processes came to nothing within {seconds:g} s: {output()}")
        time.sleep(_PAUSE)
