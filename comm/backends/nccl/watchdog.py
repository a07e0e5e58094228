"""The thread that sees operations on a stream fail, for the host does not wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from bagua_kernels.comm.backends.nccl.work import Ticket
from bagua_kernels.comm.failures.session import Session

_PERIOD = 0.05  # seconds between two looks at the operations under way
_PATIENT = 1.0  # seconds after which an operation makes its watch ask what other ranks have reported
_LINGER = 2.0  # seconds that a watch stays when nothing is under way


class Watchdog:
    """A thread that looks after the operations under way, for the host does not wait for them.

    It ends the session, which aborts the communicator, in three cases: the oldest operation takes longer than the timeout,
    NCCL reports an error, or another rank has reported one. It lives while operations are under way and a few
    seconds longer, and holds no tensor.

    Args:
        session: of the communicator.
        check: raises if NCCL has an error to report.
        prepare: called once on the thread.
    """

    def __init__(self, session: Session, check: Callable[[], None], prepare: Callable[[], None]) -> None:
        self._session = session
        self._check = check
        self._prepare = prepare
        self._tickets: deque[Ticket] = deque()
        self._oldest_since = 0.0
        self._given_up = False
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, ticket: Ticket) -> None:
        """Looks after an operation that has been issued behind all those added before."""
        with self._changed:
            if not self._tickets:
                self._oldest_since = time.monotonic()
            self._tickets.append(ticket)
            ticket.lost = self._given_up
            if self._thread is None and not self._stopping.is_set():
                name = f"bagua_kernels nccl {self._session.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def give_up(self) -> None:
        """Marks what is under way as lost; to be called before NCCL is aborted, which makes all events come."""
        with self._changed:
            self._given_up = True
            for ticket in self._tickets:
                try:
                    ticket.lost = ticket.lost or not ticket.event.query()
                except RuntimeError:
                    # What failed on the GPU is reported at every query.
                    ticket.lost = True

    def stop(self) -> None:
        """Ends the thread, within moments unless it is busy with a failure."""
        self._stopping.set()
        with self._changed:
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENT)

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            # Without a watch, what hangs would hang for ever.
            self._fail(self._tickets[0], error, timed_out=False)
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tickets or self._stopping.is_set(), timeout=_LINGER)
                if self._stopping.is_set() or not self._tickets:
                    self._thread = None
                    return
            self._look()
            self._stopping.wait(_PERIOD)

    def _look(self) -> None:
        """Forgets what has finished; judges the oldest operation that has not."""
        ticket = self._tickets[0]
        try:
            while ticket.event.query():
                self._session.finished(ticket.number)
                with self._changed:
                    self._tickets.popleft()
                    if not self._tickets:
                        return
                    # The stream begins the next operation only now, whenever that was issued.
                    self._oldest_since = time.monotonic()
                    ticket = self._tickets[0]
            self._check()
        except Exception as error:
            # Whatever it is, without a watch what hangs would hang for ever.
            self._fail(ticket, error, timed_out=False)
            return
        waited = time.monotonic() - self._oldest_since
        if waited > self._session.patience():
            self._fail(ticket, None, timed_out=True)
        elif self._session.ended or (waited > _PATIENT and self._session.reported()):
            self._fail(ticket, None, timed_out=False)

    def _fail(self, ticket: Ticket, error: Exception | None, *, timed_out: bool) -> None:
        if self._session.ended:
            # By an abort, or a failure seen elsewhere: there is nothing to add.
            self.give_up()
        else:
            ticket.error = self._session.failure(*ticket.told(), error, timed_out=timed_out)
        with self._changed:
            self._tickets.clear()
