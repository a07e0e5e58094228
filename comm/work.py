"""A communication under way."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from bagua_kernels.errors import CommunicationError


class Work(abc.ABC):
    """A communication that has been started.

    Outputs hold their values, and inputs may be changed again, only once `wait` has returned: parts of an operation
    (a division, a copy) run there. A second `wait` only repeats the error of the first one, if there was any.
    """

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until the outputs are valid: on a GPU the current stream waits, on a CPU the caller.

        Raises:
            RankLostError: if a rank that takes part died or left.
            CollectiveTimeoutError: if nothing has moved for the communicator's timeout while every rank still answered.
            CommunicationError: if it failed otherwise.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Returns True if `wait` would return, or raise, at once."""

    def count_from(self, started: float | None = None) -> None:  # noqa: B027
        """Makes the timeout begin now, or at an earlier time, instead of when `wait` is called.

        Args:
            started: the time, by the clock of the communication: `time.monotonic`, unless ranks are threads of a test.
        """


CLOSED = "it was closed"  # why a communicator cannot be used any more after `close`

# An operation in parts: yields each communication that has to be waited for before it can go on.
Steps = Generator[Work, None, None]


def drive(steps: Steps) -> None:
    """Runs an operation to its end: waits for each communication that it yields.

    An error of `wait` is raised inside the generator, at the `yield`, so that it can clean up.
    """
    for work in steps:
        try:
            work.wait()
        except BaseException as error:
            steps.throw(error)
            raise


class Pending(Work):
    """A communication that the first thread which waits for it completes; the other threads wait for that thread.

    `_conclude` runs once, however many threads wait and however often. All of them return, or raise the same error.

    Args:
        completing: the lock of the thread that completes it; an ordinary one by default.
        now: the clock that its timeout runs by.
    """

    def __init__(
        self, completing: AbstractContextManager[object] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._done = False
        self._error: Exception | None = None
        self._started: float | None = None
        self._completing = threading.Lock() if completing is None else completing

    def wait(self) -> None:
        """See `Work.wait`."""
        if not self._done:
            with self._completing:
                if not self._done and self._error is None:
                    self._complete_once()
                    return
            if self._error is not None:
                raise self._error
        self._follow()

    def count_from(self, started: float | None = None) -> None:
        """See `Work.count_from`."""
        self._started = self._now() if started is None else started

    def _complete_once(self) -> None:
        # An interruption (Ctrl-C) of this wait leaves the communication as it is: the next call waits again.
        try:
            self._complete()
        except Exception as error:
            self._error = error
            raise
        try:
            self._conclude()
            self._done = True
        except Exception as error:
            self._error = error
            raise
        except BaseException as error:
            # Half of the outputs may be written: to write them again could divide a second time.
            self._error = CommunicationError(f"the outputs were not written, for {error!r} came in between")
            raise

    @abc.abstractmethod
    def _complete(self) -> None:
        """Waits for the communication; errors as of `Work.wait`. Called again if it was interrupted."""

    def _conclude(self) -> None:
        """Writes the outputs, right after `_complete` on the same thread; called once."""

    def _follow(self) -> None:
        """Makes the caller of a later `wait` see the outputs, where that takes more than to return."""


class Together(Work):
    """Several communications that count as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them, in order, within one timeout; raises what the first to fail raises."""
        self.count_from()
        for work in self._works:
            work.wait()

    def count_from(self, started: float | None = None) -> None:
        """See `Work.count_from`."""
        for work in self._works:
            work.count_from(started)

    def is_completed(self) -> bool:
        """Returns True if all are completed."""
        return all(work.is_completed() for work in self._works)


class Finished(Work):
    """A communication that had nothing left to do when it was started."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Returns True."""
        return True


FINISHED = Finished()
