"""Warnings that a process logs once."""

from __future__ import annotations

import logging
import threading

_logged: set[tuple[object, ...]] = set()
_lock = threading.Lock()


def warn_once(logger: logging.Logger, *message: object) -> None:
    """Logs a warning, unless this process has logged the same one.

    Args:
        logger: that logs it.
        *message: its text with placeholders, and what they stand for.
    """
    # Ranks that are threads choose backends and compile kernels at the same time.
    with _lock:
        if message in _logged:
            return
        _logged.add(message)
    logger.warning(*message)


def forget() -> None:
    """Lets all warnings be logged again."""
    with _lock:
        _logged.clear()
