"""Blocks of Numba's CUDA simulator that wait for each other by locks.

Its own manager of a block asks each thread in turn whether it waits, and holds the interpreter's lock meanwhile. That is half
of the time of all simulated tests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel


class Block(kernel.BlockManager):  # type: ignore[misc]
    """Runs the threads of a block; the last one to arrive at a barrier, or to end, opens it."""

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        self._moving, self._waiting = threading.Lock(), list[Thread]()
        self._failure: tuple[BaseException, Any] | None = None
        points = list(np.ndindex(*self._block_dim))
        self._live = len(points)
        threads = [Thread(lambda: self._f(*args), self, grid_point, point, self._debug) for point in points]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            error, trace = self._failure
            raise error.with_traceback(trace)

    def wait(self, thread: Thread) -> None:
        """Waits until every thread of the block that has not ended waits, too."""
        with self._moving:
            self._waiting.append(thread)
            self._open()
        thread.gate.acquire()

    def end(self, thread: Thread) -> None:
        """Counts a thread that has ended; if it has failed, those that wait for it fail, too."""
        with self._moving:
            self._live -= 1
            self._failure = self._failure or thread.exception
            self._open()

    def _open(self) -> None:
        if len(self._waiting) == self._live:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.abort = self._failure is not None
                each.gate.release()


class Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block."""

    def __init__(self, target: Callable[[], None], block: Block, *where: Any) -> None:
        super().__init__(target, block, *where)
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self) -> None:
        super().run()
        self._manager.end(self)

    def syncthreads(self) -> None:
        self._manager.wait(self)
        if self.abort:
            raise RuntimeError("another thread of the block has failed")


def install() -> None:
    """Makes the simulator of this process run blocks so, on one processor: only one thread has the interpreter at a time."""
    kernel.BlockManager = Block
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})
