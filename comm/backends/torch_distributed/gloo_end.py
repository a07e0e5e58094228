"""The end of Gloo's groups after a failure: their destructors wait for operations, even when the process exits."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_kernels.comm.failures.failure import is_timeout
from bagua_kernels.comm.joining.bounded import bounded

_SCRAP_TAG = (1 << 31) - 1
_LONGEST_CUT = 1.0  # seconds
_PATIENCE = 5.0  # seconds for the destructors when the process exits


def cut(backend: Any, peers: Sequence[int], connected: Sequence[int] = ()) -> None:
    """Closes all connections of a backend, which ends its operations with an error.

    Gloo connects two ranks at their first message. A receive from a rank that never had one would connect. It would wait for that
    rank as long as the backend's timeout, and longer than the rank may be there. So a backend without operations is left alone.
    The receive of another one has a thread and a limit. If the limit is over the backend is kept for ever.

    Args:
        backend: torch's, of Gloo.
        peers: the other ranks.
        connected: those with which a message is under way.
    """
    if not backend._get_sequence_number_for_group():
        return
    if not threading.main_thread().is_alive():
        # No thread can start any more, and the end of the process closes the connections. Only threads of messages must end.
        _close(backend, connected, threading.Event())
        keep([backend])
        return
    try:
        bounded(lambda given_up: _close(backend, [*connected, *peers], given_up), _LONGEST_CUT)
    except TimeoutError:
        keep([backend])


def _close(backend: Any, peers: Iterable[int], given_up: threading.Event) -> None:
    for peer in peers:
        if given_up.is_set():
            return
        scrap = torch.empty(1, dtype=torch.uint8, device="cpu")
        # The purpose is the error: a receive that runs out of time closes everything. If its own connection is already
        # broken it fails at once and closes nothing, so that the next rank is tried.
        try:
            backend.recv([scrap], peer, _SCRAP_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if is_timeout(error):
                return


def cut_group(group: dist.ProcessGroup) -> None:
    """Closes the connections of a process group that is only on Gloo."""
    rank, size = group.rank(), group.size()
    if size > 1:
        backend: Any = group._get_backend(torch.device("cpu"))
        cut(backend, nearest(rank, size))


def nearest(rank: int, size: int) -> list[int]:
    """Returns the other ranks, first the neighbours in the ring: with them Gloo's collectives connect."""
    return sorted(
        (peer for peer in range(size) if peer != rank), key=lambda peer: min((peer - rank) % size, (rank - peer) % size)
    )


def free(items: list[Any]) -> None:
    """Drops the last references to what destructors may wait for, on a thread of its own.

    Args:
        items: emptied; the caller has no other reference to what is in it.
    """
    if not threading.main_thread().is_alive():
        # The interpreter ends, and would abort the process if such a thread came back from C++ later.
        keep(items)
        return
    thread = threading.Thread(target=_free, args=(items,), name="bagua_kernels freeing", daemon=True)
    _freeing[thread] = items
    thread.start()


def keep(items: Iterable[Any]) -> None:
    """Keeps objects for ever, so that their destructors never run."""
    for item in items:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def await_freed(seconds: float) -> bool:
    """Waits for what is being freed; returns True if nothing is left of it."""
    deadline = time.monotonic() + seconds
    for thread in list(_freeing):
        thread.join(max(0.0, deadline - time.monotonic()))
    return not _freeing


def _free(items: list[Any]) -> None:
    while items:
        items.pop()
    _freeing.pop(threading.current_thread(), None)


def _forget() -> None:
    """A forked child has neither the threads here nor those for which the destructors wait."""
    for items in _freeing.values():
        keep(items)
    _freeing.clear()


_freeing: dict[threading.Thread, list[Any]] = {}
atexit.register(await_freed, _PATIENCE)
os.register_at_fork(after_in_child=_forget)
