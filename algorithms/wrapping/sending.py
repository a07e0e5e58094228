"""Tells, on rank 0, of sending that takes long: what, how much, about how long; and at a terminal how far it is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress

from bagua_kernels.comm import Communicator
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.stillness import amount

_LEAST = 1 << 20  # bytes; less is not looked at
_LOOK = 0.5  # seconds between two looks
_FIRST = 2.0  # seconds after which the rate is known
_LONG = 10.0  # seconds of sending ahead that are worth a line

_log = logging.getLogger(__name__)


class Sending:
    """Looks, within a `with` block, at the bytes that a communicator moves; does nothing on other ranks than 0.

    Args:
        what: is sent, for the line.
        nbytes: that leave or arrive at this rank in the block.
        communicator: that moves them. Where the number of bytes is not known, nothing is logged.
    """

    def __init__(self, what: str, nbytes: float, communicator: Communicator) -> None:
        self._what, self._nbytes = what, nbytes
        session = getattr(communicator, "session", None)
        looks = communicator.rank == 0 and communicator.size > 1 and nbytes >= _LEAST and isinstance(session, Session)
        self._session: Session | None = session if looks else None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._session is not None:
            self._thread = threading.Thread(target=self._look, args=(self._session,), name="bagua_kernels sending")
            self._thread.daemon = True
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, session: Session) -> None:
        before, began = session.moved(), time.monotonic()
        while not self._over.wait(_LOOK):
            moved, seconds = session.moved() - before, time.monotonic() - began
            if seconds >= _FIRST and moved > 0 and (self._nbytes - moved) * seconds / moved > _LONG:
                _log.warning("%s", self._line(moved, seconds))
                self._show(session, before)
                return

    def _line(self, moved: int, seconds: float) -> str:
        rate = moved / seconds
        left = (self._nbytes - moved) / rate
        return (
            f"{self._what} is being sent: {amount(self._nbytes)}, of which {amount(moved)} took {seconds:.0f} s, "
            f"at {8e-6 * rate:.3g} Mbit/s; about {left:.0f} s are left"
        )

    def _show(self, session: Session, before: int) -> None:
        console = Console(stderr=True)
        if not console.is_terminal:
            return
        # Another display may have the terminal.
        with contextlib.suppress(LiveError), Progress(console=console, transient=True) as progress:
            task = progress.add_task(self._what, total=self._nbytes)
            while not self._over.wait(_LOOK):
                progress.update(task, completed=min(self._nbytes, session.moved() - before))
