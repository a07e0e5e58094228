"""The cost of compilation in this process: its seconds, and one logged line, so that a user knows why training waits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bagua_kernels import knobs

logger = logging.getLogger(__name__)

_AFTER = 1.0  # seconds of compilation after which it is announced


class _Clock:
    """Seconds during which at least one kernel was being compiled, or another process's compilation was waited for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.begun = 0.0
        self.total = 0.0
        self.announced = False
        self.timer: threading.Timer | None = None

    def seconds(self) -> float:
        with self.lock:
            return self.total + (time.perf_counter() - self.begun if self.depth else 0.0)


_clock = _Clock()


def _forget_threads() -> None:
    """For a forked process, in which nobody will end the compilations of its parent's threads."""
    global _clock
    before, _clock = _clock, _Clock()
    _clock.total, _clock.announced = before.total, before.announced


os.register_at_fork(after_in_child=_forget_threads)


def seconds() -> float:
    """Seconds that this process has spent on loading the compiler and compiling kernels for the CPU, or on waiting for others."""
    return _clock.seconds()


def clock() -> float:
    """A clock in seconds that stands still while kernels are compiled: first steps are timed as later ones."""
    with _clock.lock:
        now = _clock.begun if _clock.depth else time.perf_counter()
        return now - _clock.total


def begin(folder: str) -> None:
    """Starts the clock; a kernel may be compiled while another one is. `folder` will keep it, and is empty if none does."""
    with _clock.lock:
        _clock.depth += 1
        if _clock.depth > 1:
            return
        _clock.begun = time.perf_counter()
        # Of all ranks one speaks; a process without a launcher is one by itself.
        if not _clock.announced and not knobs.RANK.get():
            _clock.timer = threading.Timer(max(0.0, _AFTER - _clock.total), _announce, (folder,))
            _clock.timer.daemon = True
            _clock.timer.start()


def end() -> None:
    """Stops the clock."""
    with _clock.lock:
        _clock.depth -= 1
        if _clock.depth:
            return
        _clock.total += time.perf_counter() - _clock.begun
        if _clock.timer is not None:
            _clock.timer.cancel()
            _clock.timer = None


@contextmanager
def loading() -> Iterator[None]:
    """For the import of a compiler, which takes half a second: the clock runs, but nothing is announced."""
    with _clock.lock:
        _clock.depth += 1
        if _clock.depth == 1:
            _clock.begun = time.perf_counter()
    try:
        yield
    finally:
        end()


def _announce(folder: str) -> None:
    with _clock.lock:
        if _clock.announced or not _clock.depth:
            return
        _clock.announced = True
    if not folder:
        logger.warning("compiling kernels for this processor, which takes some seconds at each start")
        return
    logger.warning(
        "compiling kernels for this processor, which takes some seconds at the first use only: they are kept in %s "
        "(NUMBA_CACHE_DIR names another folder, `python -m bagua_kernels.warmup` compiles them ahead of time)",
        folder,
    )
