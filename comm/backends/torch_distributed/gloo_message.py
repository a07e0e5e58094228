"""Messages between two ranks over Gloo, waited for on threads of their own.

Torch completes a send or receive of Gloo only inside its `wait`. A `wait` that times out closes the connections to all
ranks. Therefore a thread calls `wait` once, without a limit, as soon as the message has been started. Callers wait for
that thread, with any timeout and any number of times.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua_kernels.comm.backends.torch_distributed.gloo_end import cut

_FOR_EVER = timedelta(days=3650)
_IDLE = 1.0  # seconds that a thread stays without a message
_PATIENCE = 10.0  # seconds for the threads to see that their connections are gone


class GlooMessages:
    """The sends and receives of one Gloo backend that are under way.

    Args:
        backend: torch's; kept while messages are under way.
        peers: the other ranks.
    """

    def __init__(self, backend: Any, peers: Sequence[int]) -> None:
        self._backend = backend
        self._peers = peers
        self._under_way: set[GlooMessage] = set()

    def start(self, handle: Any, data: torch.Tensor, peer: int) -> GlooMessage:
        """Returns a message that torch has started.

        Args:
            handle: torch's work, for which nobody else waits.
            data: the memory that Gloo reads or writes; kept until Gloo is done with it.
            peer: the other rank; Gloo has connected to it.
        """
        message = GlooMessage(handle, data, peer, self)
        with _listing:
            self._under_way.add(message)
            _busy.add(self)
        _threads.run(message.finish)
        return message

    def ended(self, message: GlooMessage) -> None:
        """Notes that a message has ended."""
        with _listing:
            self._under_way.discard(message)
            if not self._under_way:
                _busy.discard(self)

    def sever(self) -> None:
        """Closes the connections if messages are under way, which ends them, and waits for their threads."""
        if self._under_way:
            self.cut()

    def cut(self) -> None:
        """Closes the connections, which ends all operations, and waits for the messages' threads."""
        under_way = list(self._under_way)
        cut(self._backend, self._peers, [message.peer for message in under_way])
        deadline = time.monotonic() + _PATIENCE
        for message in under_way:
            message.join(max(0.0, deadline - time.monotonic()))


class GlooMessage:
    """One send or receive under way; it has the methods of torch's work.

    Args:
        handle: torch's work.
        data: the memory that Gloo reads or writes.
        peer: the other rank.
        messages: where the message is listed until it has ended.
    """

    def __init__(self, handle: Any, data: torch.Tensor, peer: int, messages: GlooMessages) -> None:
        self.peer = peer
        self._handle = handle
        self._data: torch.Tensor | None = data
        self._messages: GlooMessages | None = messages
        self._error: RuntimeError | None = None
        self._over = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_completed(self) -> bool:
        """Returns True if it has ended, well or not."""
        return self._over

    def wait(self, limit: timedelta) -> None:
        """Waits until it has ended; may be called again.

        Raises:
            RuntimeError: if it has failed, or not ended in time.
        """
        if not self.join(limit.total_seconds()):
            raise RuntimeError("the message is still under way")
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> bool:
        """Waits until it has ended, well or not; returns True if it has."""
        if self._over:
            return True
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()
        return True

    def finish(self) -> None:
        """Waits for Gloo, as long as it takes."""
        try:
            self._handle.wait(_FOR_EVER)
        except RuntimeError as error:
            self._error = error
        messages, self._data, self._handle, self._messages = self._messages, None, None, None
        if messages is not None:
            messages.ended(self)
        self._over = True
        self._gate.release()


class _Thread:
    """A thread that calls one function after the other."""

    def __init__(self, threads: _Threads) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = threads
        threading.Thread(target=self._run, name="bagua_kernels message", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=_IDLE)
            except queue.Empty:
                if self._threads.leave(self):
                    return
                call = self.calls.get()
            call()
            del call
            self._threads.rest(self)


class _Threads:
    """As many threads as there are calls at a time; one that has nothing to do ends after a while."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._lock = threading.Lock()

    def run(self, call: Callable[[], None]) -> None:
        """Calls a function on a thread."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        (thread or _Thread(self)).calls.put(call)

    def rest(self, thread: _Thread) -> None:
        """Offers a thread for the next call."""
        with self._lock:
            self._idle.append(thread)

    def leave(self, thread: _Thread) -> bool:
        """Takes an idle thread off the list; returns False if a call is on its way to it."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            return True

    def forget(self) -> None:
        """Forgets all threads: a forked child has none of them."""
        self._idle, self._lock = [], threading.Lock()


@atexit.register
def _sever_busy() -> None:
    """A thread that is in Gloo when the interpreter ends would end the process with an abort."""
    for messages in list(_busy):
        messages.sever()


_busy: set[GlooMessages] = set()
_listing = threading.Lock()
_threads = _Threads()


def _forget() -> None:
    """A forked child has none of the threads."""
    global _listing
    _listing = threading.Lock()
    _threads.forget()
    _busy.clear()


os.register_at_fork(after_in_child=_forget)
