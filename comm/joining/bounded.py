"""Calls that end in time: of torch's stores, and of what waits in them."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

T = TypeVar("T")

_PATIENCE = 5.0  # seconds for the thread to end
_GLANCE = 0.05  # seconds between two looks at whether waiting still makes sense
_PAUSES = (0.001, 0.02)  # seconds between two questions to a store: the first, and the longest
_SHARE = 0.125  # of a wait that has passed before the next question
_RAREST = 0.25  # seconds between two questions of a long wait


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

    def gather(self, keys: list[str]) -> list[str]:
        """Returns the texts of keys that are there, in one message and its answer where the store can do so."""
        return [text.decode() for text in self._ask(lambda: values_of(self._store, keys))]

    def wait(self, keys: list[str], seconds: float) -> bool:
        """Returns True as soon as all of the keys are there, and False if they are not within some seconds."""
        return _until(lambda: bool(self._ask(lambda: self._store.check(keys))), seconds)

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


def values_of(store: Any, keys: list[str]) -> list[bytes]:
    """Returns the values of keys that are there, in one message and its answer where the store can do so."""
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]


def await_keys(store: Store, keys: list[str], seconds: float, given_up: threading.Event | None = None) -> bool:
    """Waits until keys are there, by asking whether they are, more rarely the longer it takes.

    A wait of torch's own store cannot be ended, blocks every other call of that store, and prints warnings when its time is
    over.

    Args:
        store: where they will be.
        keys: all of them are awaited.
        seconds: the longest wait.
        given_up: set when nobody waits any more.

    Returns:
        True if all are there.

    Raises:
        GivenUpError: if nobody waits any more.
        RuntimeError: if the store cannot be reached.
    """

    def there() -> bool:
        if given_up is not None and given_up.is_set():
            raise GivenUpError("nobody waits for this any more")
        return store.check(keys)

    return _until(there, seconds)


def _until(there: Callable[[], bool], seconds: float) -> bool:
    """Asks until the answer is True, or for some seconds; returns the last answer.

    Pauses grow with the wait, so that a hundred ranks that wait for the last one hardly cost the store's host anything.
    """
    began = time.monotonic()
    end = began + seconds
    while not there():
        # A time and not a difference: what is left of one may be too little to move a clock, by rounding.
        now = time.monotonic()
        if now >= end:
            return False
        time.sleep(min(max(_PAUSES[0], (now - began) * _SHARE), _RAREST, end - now))
    return True


class GivenUpError(RuntimeError):
    """Nobody waits any more for what this thread does."""


class PatientStore(Store):
    """A store whose waits end when nobody wants their result any more.

    A wait of torch's own store cannot be ended, and blocks every other call of that store.

    Args:
        store: where the keys are.
        given_up: set when the caller no longer waits.
    """

    def __init__(self, store: Store, given_up: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._given_up = given_up

    def set(self, key: str, value: Any) -> None:
        """Stores bytes."""
        self._check()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the bytes of a key, for which it waits."""
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Returns True if all keys are there."""
        self._check()
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there, for as long as the result is wanted: that limit is the caller's."""
        pause = _PAUSES[0]
        while not self.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    def add(self, key: str, amount: int) -> int:
        """Adds to the number of a key; returns it."""
        self._check()
        return self._store.add(key, amount)

    def clone(self) -> Store:
        """Returns another connection, whose waits are torch's."""
        cloned: Store = self._store.clone()  # type: ignore[attr-defined]
        return cloned

    def _check(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError("nobody waits for this any more")


class KeptStore(PrefixStore):
    """A store for everyone, beside which another one lives on that only C++ holds.

    Args:
        prefix: of the keys.
        store: where they are.
        other: which C++ may ask: it would find none of its methods if no variable of Python held it.
    """

    def __init__(self, prefix: str, store: Store, other: PatientStore) -> None:
        super().__init__(prefix, store)
        self._other = other


class _Call(Generic[T]):
    def __init__(self, call: Callable[[threading.Event], T]) -> None:
        self.given_up = threading.Event()
        self.ended = threading.Event()
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._call = call

    def run(self, undo: Callable[[T], object] | None) -> None:
        try:
            result = self._call(self.given_up)
            self.results.append(result)
            if self.given_up.is_set() and undo is not None:
                undo(result)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def bounded(
    call: Callable[[threading.Event], T],
    seconds: float,
    look: Callable[[], object] | None = None,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Returns what a call returns that may never come back; it has a thread of its own.

    Args:
        call: gets an event that is set when nobody waits any more.
        seconds: the longest wait.
        look: called again and again meanwhile; what it raises ends the wait.
        undo: gets what the call returns after nobody has waited any more.

    Raises:
        TimeoutError: if the time is over.
    """
    waited = _Call(call)
    thread = threading.Thread(target=waited.run, args=(undo,), name="bagua_kernels opening", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    try:
        while not waited.ended.wait(max(0.0, min(_GLANCE, deadline - time.monotonic()))):
            if look is not None:
                look()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"it did not come back within {seconds:.3g} s")
    except BaseException:
        waited.given_up.set()
        # A thread that comes back from C++ while the interpreter ends would end the process with an abort.
        atexit.register(thread.join, _PATIENCE)
        raise
    thread.join()
    if waited.error is not None:
        raise waited.error
    return waited.results[0]
