"""A communication under way."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from bagua_kernels.errors import CommunicationError


class Work(abc.ABC):
    """A communication that has been started.

    Outputs hold their values, and inputs may be changed again, only once `wait` has returned: parts of an operation
    (a division, a copy) run there. Waiting again is harmless, and repeats the error of the first time if there was one.
    """

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until the outputs are valid: on a GPU the current stream waits, on a CPU the caller.

        Raises:
            RankLostError: if a rank that takes part died or left.
            CollectiveTimeoutError: if the communicator's timeout ran out while every rank still answered.
            CommunicationError: if it failed otherwise.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""


class Pending(Work):
    """A communication that is completed once, by the first `wait`; later ones return, or raise, the same."""

    def __init__(self) -> None:
        self._done = False
        self._error: CommunicationError | None = None

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._done:
            return
        if self._error is not None:
            raise self._error
        try:
            self._complete()
        except CommunicationError as error:
            self._error = error
            raise
        self._done = True

    @abc.abstractmethod
    def _complete(self) -> None:
        """Waits for the communication and writes its outputs; errors as of `Work.wait`."""


class Together(Work):
    """Several communications that count as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them, in order; raises what the first to fail raises."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Returns whether all are completed."""
        return all(work.is_completed() for work in self._works)


class Finished(Work):
    """A communication that had nothing left to do when it was started."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Returns True."""
        return True


FINISHED = Finished()
