"""A store of torch's whose calls end in time."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

_PATIENCE = 5.0  # seconds for the thread to end


class BoundedStore:
    """Asks a store on a thread of its own: a `TCPStore` waits for ever for a host that is stopped.

    Every call raises `TimeoutError` once the time is over, or the RuntimeError of the store. Calls come from one thread.

    Args:
        store: where the keys are.
        deadline: when the time is over, as of `time.monotonic`; it may be moved.
    """

    def __init__(self, store: Store, deadline: float) -> None:
        self.deadline = deadline
        self._store = store
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._lost = False
        self._thread: threading.Thread | None = None

    def set(self, key: str, value: str) -> None:
        """Stores a text."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Returns the text of a key that is there."""
        return str(self._ask(lambda: self._store.get(key)).decode())

    def check(self, key: str) -> bool:
        """Returns True if a key is there."""
        return bool(self._ask(lambda: self._store.check([key])))

    def __enter__(self) -> BoundedStore:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self.close()

    def close(self) -> None:
        """Ends the thread, for which it waits unless a call has not come back."""
        self._calls.put(None)
        if self._thread is None:
            return
        self._thread.join(0.0 if self._lost else _PATIENCE)
        if self._thread.is_alive():
            # A thread that comes back from C++ while the interpreter ends would end the process with an abort.
            atexit.register(self._thread.join, _PATIENCE)

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bagua_kernels store", daemon=True)
            self._thread.start()
        if self._lost:
            raise TimeoutError("the store does not answer")
        self._calls.put(call)
        try:
            answer, error = self._answers.get(timeout=max(0.1, self.deadline - time.monotonic()))
        except queue.Empty:
            self._lost = True
            self.close()
            raise TimeoutError("the store does not answer") from None
        if error is not None:
            raise error
        return answer

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((call(), None))
            except RuntimeError as error:
                self._answers.put((None, error))
