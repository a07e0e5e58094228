"""Runs a compiled kernel over its work, on as many threads as torch uses; see `shared`."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import llvmlite.binding
import numba
import torch

logger = logging.getLogger(__name__)


class _Launcher(NamedTuple):
    """Where Numba's launcher is, and what a launch must hold."""

    address: int
    turn: AbstractContextManager[Any]


@functools.cache
def _launcher() -> _Launcher:
    """Starts Numba's threads.

    A launch holds nothing, unless Numba has only its `workqueue` threads. Those abort the process when two threads launch at
    once, which the training and the communication thread do. TBB and OpenMP do not mind; torch's Linux wheels bring an OpenMP
    that Numba finds, since torch is imported first.
    """
    threads = torch.get_num_threads()
    numba.get_num_threads()
    # GNU OpenMP keeps one thread count for all its users; Numba's start-up may have changed torch's.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    address = llvmlite.binding.address_of_symbol("numba_parallel_for")
    if address is None:
        logger.warning("this Numba (%s) has no numba_parallel_for; kernels run on one thread", numba.__version__)
    elif numba.threading_layer() == "workqueue":
        logger.warning(
            "Numba has neither TBB nor OpenMP here; kernels of different threads take turns (pip install tbb)"
        )
        return _Launcher(address, _one_at_a_time)
    return _Launcher(address or 0, nullcontext())


_one_at_a_time = threading.Lock()

# Up to this many elements waking other threads costs more than it saves.
_SERIAL = 32_768


def threads_for(elements: int, pieces: int) -> int:
    """How many threads a kernel is to run on: one if there is little to do, or torch has no other thread to give it.

    Args:
        elements: that it works on.
        pieces: into which its work can be divided.
    """
    if elements <= _SERIAL:
        return 1
    most: int = numba.config.NUMBA_NUM_THREADS
    return max(1, min(torch.get_num_threads(), most, pieces))


def run_all(kernel: Callable[..., Any], arguments: tuple[Any, ...], pieces: int, elements: int) -> None:
    """Calls a kernel over all pieces of its work, on as many threads as these elements are worth; see `run`."""
    run(kernel, arguments, pieces, threads_for(elements, pieces))


def run(kernel: Callable[..., Any], arguments: tuple[Any, ...], pieces: int, threads: int) -> None:
    """Calls a kernel over all pieces of its work.

    Args:
        kernel: takes the arguments, and what `shared` does.
        arguments: of all threads.
        pieces: of which each thread takes as many that follow one another.
        threads: what `threads_for` returned, or fewer.
    """
    if threads > 1:
        launcher, turn = _launcher()
        if launcher:
            with turn:
                kernel(*arguments, 0, pieces, threads, launcher)
            return
    kernel(*arguments, 0, pieces, 1, 0)
