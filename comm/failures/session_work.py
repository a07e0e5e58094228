"""One operation under way, and how it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from bagua_kernels.comm.failures.failure import is_timeout
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.stillness import Stillness
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CommunicationError

# Between two looks at what other ranks reported; it also bounds how long Ctrl-C and `abort` take.
_SLICE = 0.25
_LEAST = 0.001  # of the time that is left; less counts as 0
_A_SLICE = timedelta(seconds=_SLICE)


@dataclass(eq=False, repr=False)
class SessionWork(Pending):
    """One operation under way, of torch or of this package's own sockets: `handle` has the methods of torch's work.

    Attributes:
        device: the GPU whose current stream waits for the operation; None if the host waits.
    """

    session: Session
    handle: Any
    operation: str
    number: int | None
    peer: int | None
    finish: Callable[[], None] | None
    device: torch.device | None
    missing: Callable[[], list[int]] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._first_stream: torch.cuda.Stream | None = None
        self._noted = False
        self.session.begin()

    def is_completed(self) -> bool:
        """Returns True if `wait` would return, or raise, at once."""
        return self._done or self._error is not None or bool(self.session.ended) or bool(self.handle.is_completed())

    def _complete(self) -> None:
        if self.device is not None:
            self.session.guard(self.operation, self.handle.wait, self.number, self.peer)
        else:
            self._wait_on_host()

    def _conclude(self) -> None:
        if self.finish is not None:
            if self.device is not None:
                self._first_stream = torch.cuda.current_stream(self.device)
            self.finish()
        self.session.finished(self.number)

    def _follow(self) -> None:
        if self.device is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._first_stream is None:
            self.session.guard(self.operation, self.handle.wait, self.number, self.peer)
        elif self._first_stream != stream:
            # `finish` ran on the stream of the first wait.
            stream.wait_stream(self._first_stream)

    def _wait_on_host(self) -> None:
        if self.peer is not None:
            self.session.waits(self.peer)
        try:
            self._wait_in_slices()
        finally:
            if self.peer is not None or self._noted:
                self.session.waits(None)

    def _wait_in_slices(self) -> None:
        session = self.session
        still = Stillness(time.monotonic() if self._started is None else self._started)
        left = session.left(still.since(), time.monotonic())
        while True:
            try:
                self.handle.wait(_A_SLICE if left >= _SLICE else timedelta(seconds=max(0.001, left)))
                return
            except RuntimeError as error:
                if session.ended and session.failed is None:
                    raise self._given_up() from None
                if self.handle.is_completed():
                    self._settle(error)
                    return
            if session.ended:
                raise self._fail(None, timed_out=False) if session.failed else self._given_up()
            if session.reported():
                raise self._fail(None, timed_out=session.is_over(left))
            missing = self._note_missing()
            now, over = time.monotonic(), left <= _SLICE
            session.look(still, self.peer, getattr(self.handle, "moved", 0), now)
            left = session.left(still.since(), now)
            if over and left <= _LEAST:
                raise self._fail(None, timed_out=True, missing=missing, still=still)

    def _note_missing(self) -> list[int]:
        """Returns the ranks whose messages are missing in a collective, where the transport knows them."""
        missing = self.missing() if self.missing is not None and self.peer is None else []
        if missing:
            self._noted = True
            self.session.waits(missing[0])
        return missing

    def _settle(self, error: RuntimeError) -> None:
        """Decides about an operation that is complete after `wait` raised: it may have finished right after."""
        try:
            self.handle.wait(timedelta(seconds=1))
        except RuntimeError as final:
            raise self._fail(final, timed_out=is_timeout(final)) from final

    def _fail(
        self,
        error: Exception | None,
        *,
        timed_out: bool,
        missing: Sequence[int] = (),
        still: Stillness | None = None,
    ) -> CommunicationError:
        call = self.operation, self.number, self.peer
        progress, since = ("", None) if still is None else (still.told(time.monotonic()), still.since())
        return self.session.failure(*call, error, timed_out=timed_out, missing=missing, progress=progress, still=since)

    def _given_up(self) -> CommunicationError:
        return CommunicationError(f"{self.operation} was given up: {self.session.ended}")
