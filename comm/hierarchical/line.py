"""Operations in several parts that follow each other, so that all ranks start the parts in one order."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import torch

from bagua_kernels.comm.work import Steps, Work
from bagua_kernels.errors import CommunicationError


class Line:
    """The operations of one communicator that are under way, first in, first out.

    An operation starts its first communication at once. Its later ones start when a thread waits for it, or for one behind it,
    and after all those before it have ended.
    """

    def __init__(self, device: torch.device) -> None:
        """Begins with none.

        Args:
            device: of the tensors.
        """
        self.device = device
        self._operations: collections.deque[Operation] = collections.deque()
        # Held by the thread that drives the first operation. Others may start operations meanwhile.
        self._driving = threading.Lock()

    def start(self, steps: Steps) -> Work:
        """Starts an operation.

        Args:
            steps: yields the communications of the operation, of which at least the first starts before it yields.
        """
        operation = Operation(steps, self)
        self._operations.append(operation)
        return operation

    def under_way(self) -> list[Work]:
        """Returns the operations that have not ended, as far as this is known without looking."""
        return list(self._operations)

    def drive(self, until: Operation) -> None:
        """Waits for all operations up to one."""
        while not until.ended:
            with self._driving:
                if not until.ended:
                    self._operations[0].run()
                    self._drop_ended()

    def advance(self) -> None:
        """Starts what can start without a wait."""
        if not self._driving.acquire(blocking=False):
            return  # another thread does
        with contextlib.ExitStack() as held:
            held.callback(self._driving.release)
            while self._operations and self._operations[0].step():
                self._drop_ended()

    def _drop_ended(self) -> None:
        while self._operations and self._operations[0].ended:
            self._operations.popleft()


class Operation(Work):
    """One operation of a `Line`.

    Attributes:
        ended: True if it has ended, be it by an error.
    """

    def __init__(self, steps: Steps, line: Line) -> None:
        """Starts its first communication."""
        self._steps: Iterator[Work] = steps
        self._line = line
        self._error: Exception | None = None
        self.ended = False
        self._written: torch.cuda.Event | None = None  # on a GPU, behind what the operation has queued
        self._current = self._next()

    def wait(self) -> None:
        """See `Work.wait`."""
        self._line.drive(self)
        if self._error is not None:
            raise self._error
        if self._written is not None:
            # Another thread may have driven it, on a stream of its own.
            torch.cuda.current_stream(self._line.device).wait_event(self._written)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self.ended:
            self._line.advance()
        return self.ended

    def count_from(self, started: float | None = None) -> None:
        """See `Work.count_from`: the communication that is under way."""
        if self._current is not None:
            self._current.count_from(started)

    def run(self) -> None:
        """Waits until it has ended; an interrupt leaves it as it is, and the next call goes on."""
        while self._current is not None:
            self._finish(self._current)

    def step(self) -> bool:
        """Goes on if that takes no wait; returns True if it has ended."""
        while self._current is not None and self._current.is_completed():
            self._finish(self._current)
        return self.ended

    def _finish(self, work: Work) -> None:
        try:
            work.wait()
        except Exception as error:
            self._fail(error)
        else:
            self._current = self._next()

    def _next(self) -> Work | None:
        try:
            found = next(self._steps, None)
        except Exception as error:
            self._error, found = error, None
        if found is None and self._error is None and self._line.device.type == "cuda":
            self._written = torch.cuda.current_stream(self._line.device).record_event()
        self.ended = found is None
        return found

    def _fail(self, error: Exception) -> None:
        """Lets the steps clean up."""
        self._current, self._error, self.ended = None, error, True
        try:
            self._steps.throw(error)  # type: ignore[attr-defined]
        except Exception as raised:
            self._error = raised
        else:
            raise CommunicationError(f"an operation went on after an error: {error}") from error
