"""Operations that run on a stream: waiting for them without the host, and the thread that sees them fail."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CommunicationError

_PERIOD = 0.05  # seconds between two looks at the operations under way
_PATIENT = 1.0  # seconds after which an operation makes its watch ask what other ranks have reported
_LINGER = 2.0  # seconds that a watch stays when nothing is under way


@dataclass
class Ticket:
    """One operation, as its work and the watch see it.

    Attributes:
        operation: its name.
        number: its number; None if not all ranks take part.
        peers: the other ranks that take part; empty for all.
        event: recorded on the stream behind it; None until it is issued.
        captured: whether it went into a CUDA graph, so that the event must not be queried.
        lost: whether it was under way when the communicator was given up; its event comes nevertheless.
        error: why it failed, if that is what the communicator was given up for.
    """

    operation: str
    number: int | None
    peers: tuple[int, ...] = ()
    event: Any = None
    captured: bool = False
    lost: bool = False
    error: CommunicationError | None = None

    def told(self) -> tuple[str, int | None, int | None]:
        """Returns the operation, its number and its only peer as `Session.failure` takes them."""
        if len(self.peers) > 1:
            return f"{self.operation} with ranks {', '.join(map(str, self.peers))}", None, None
        return self.operation, self.number, self.peers[0] if self.peers else None


@dataclass(frozen=True)
class Message:
    """One `send` or `recv` that has been called but not issued.

    Attributes:
        kind: which of the two.
        peer: the other rank.
        tensor: what to send, or where to receive.
        ready: recorded on the stream that was current at the call.
        ticket: the operation.
    """

    kind: Literal["send", "recv"]
    peer: int
    tensor: torch.Tensor
    ready: Any
    ticket: Ticket


class NcclWork(Pending):
    """One operation of NCCL under way, or waiting to be issued.

    Args:
        session: of the communicator.
        ticket: the operation.
        current_stream: returns the stream that is to wait.
        record_stream: tells the allocator that a stream uses a tensor's memory.
        tensors: kept from being freed until then; within a CUDA graph nothing else keeps them.
        finish: completes the outputs, on that stream.
        issue: issues the operation if that has not been done.
    """

    def __init__(
        self,
        session: Session,
        ticket: Ticket,
        current_stream: Callable[[], Any],
        record_stream: Callable[[torch.Tensor, Any], None],
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        issue: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._session = session
        self._ticket = ticket
        self._current_stream = current_stream
        self._record_stream = record_stream
        self._tensors = tensors
        self._finish = finish
        self._issue = issue
        self._first_stream: Any = None

    def is_completed(self) -> bool:
        """Returns whether the operation has finished on the GPU; true of one in a CUDA graph, which runs later."""
        if self._done or self._error is not None or self._session.ended:
            return True
        self._make_sure_of_issue()
        return self._ticket.captured or bool(self._ticket.event.query())

    def _complete(self) -> None:
        ticket, session = self._ticket, self._session
        if not session.ended:
            self._make_sure_of_issue()
        if ticket.error is not None:
            raise ticket.error
        if ticket.event is None:
            raise _told(session, ticket)
        # First the event, then the mark: an abort sets the mark before it makes the event come.
        finished = not session.ended or ticket.captured or ticket.event.query()
        if ticket.lost or not finished:
            raise _told(session, ticket)

    def _conclude(self) -> None:
        ticket = self._ticket
        stream = self._first_stream = self._current_stream()
        stream.wait_event(ticket.event)
        if self._finish is not None:
            self._finish()
        if not ticket.captured:
            # This may not be the stream that a temporary was made on, which could otherwise use its memory at once.
            for tensor in self._tensors:
                self._record_stream(tensor, stream)
        self._tensors = []

    def _follow(self) -> None:
        stream = self._current_stream()
        if stream == self._first_stream:
            return
        # `finish` ran on the stream of the first wait.
        stream.wait_event(self._ticket.event if self._finish is None else self._first_stream.record_event())

    def wait_on_host(self) -> None:
        """Blocks the caller until the operation has finished on the GPU; errors as of `wait`."""
        self.wait()
        while not (self._ticket.lost or self._ticket.event.query()):
            # The watch gives the operation up when time is up.
            time.sleep(_PERIOD / 10)
        if self._ticket.lost:
            raise self._ticket.error or _told(self._session, self._ticket)

    def _make_sure_of_issue(self) -> None:
        if self._ticket.event is None and self._issue is not None:
            self._issue()


class Watch:
    """A thread that looks after the operations under way, for the host does not wait for them.

    It ends the session, which aborts the communicator, when the oldest operation takes longer than the timeout, when
    NCCL reports an error, or when another rank has reported one. It lives while operations are under way and a few
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


class Lane:
    """Puts operations on a communicator's stream, in between events of the caller's streams.

    Args:
        session: of the communicator.
        runtime: the GPU.
        endpoint: NCCL.
        device: where tensors are.
    """

    def __init__(self, session: Session, runtime: Runtime, endpoint: Endpoint, device: torch.device) -> None:
        self.endpoint = endpoint
        self.watch = Watch(session, endpoint.check, self._prepare_watch)
        self._session = session
        self._runtime = runtime
        self._device = device
        self._queued: dict[int, list[Message]] = {}

    def abort(self) -> None:
        """Gives up what is under way; may block as long as NCCL does."""
        self.watch.give_up()
        self.endpoint.abort()

    def start(
        self,
        ticket: Ticket,
        issue: Callable[[Endpoint], None],
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> NcclWork:
        """Issues an operation behind what the current stream holds; for the arguments see `NcclWork`."""
        self._launch([ticket], issue, tensors, [self._mark()])
        return self._work(ticket, tensors, finish)

    def queue(self, kind: Literal["send", "recv"], peer: int, tensor: torch.Tensor, tag: int) -> NcclWork:
        """Keeps a `send` or `recv` until `issue_queued`, which its work calls when it is waited for."""
        ticket = Ticket(kind, None, (peer,))
        self._queued.setdefault(tag, []).append(Message(kind, peer, tensor, self._mark(), ticket))
        return self._work(ticket, [tensor], issue=partial(self.issue_queued, tag))

    def issue_queued(self, tag: int | None = None) -> None:
        """Issues what is queued, a group for each tag; of one tag, or of all in the order of their first calls."""
        for each in list(self._queued) if tag is None else [tag]:
            messages = self._queued.pop(each)
            to: dict[int, list[torch.Tensor]] = {}
            of: dict[int, list[torch.Tensor]] = {}
            for message in messages:
                (to if message.kind == "send" else of).setdefault(message.peer, []).append(message.tensor)
            tensors, ready = [message.tensor for message in messages], [message.ready for message in messages]
            issue = lambda nccl, to=to, of=of: nccl.exchange(of, to)  # noqa: E731
            self._launch([message.ticket for message in messages], issue, tensors, ready)

    def _launch(
        self, tickets: list[Ticket], issue: Callable[[Endpoint], None], tensors: list[torch.Tensor], ready: list[Any]
    ) -> None:
        """Puts work on the stream behind the `ready` events, and an event behind the work."""
        cuda, stream, first = self._runtime.cuda, self.endpoint.stream, tickets[0]
        for event in ready:
            stream.wait_event(event)
        with cuda.stream(stream):
            # Waiting for a captured event has made the stream part of that capture.
            captured = cuda.is_current_stream_capturing()
            if not captured:
                for tensor in tensors:
                    self._runtime.record_stream(tensor, stream)
            try:
                issue(self.endpoint)
            except RuntimeError as error:
                raise _told(self._session, first, error) from error
            done = cuda.Event()
            done.record(stream)
        for ticket in tickets:
            ticket.event, ticket.captured = done, captured
            if not captured:
                self.watch.add(ticket)

    def _work(
        self,
        ticket: Ticket,
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        issue: Callable[[], None] | None = None,
    ) -> NcclWork:
        streams = self._current_stream, self._runtime.record_stream
        return NcclWork(self._session, ticket, *streams, tensors, finish, issue)

    def _current_stream(self) -> Any:
        return self._runtime.cuda.current_stream(self._device)

    def _mark(self) -> Any:
        event = self._runtime.cuda.Event()
        event.record(self._current_stream())
        return event

    def _prepare_watch(self) -> None:
        self._runtime.cuda.set_device(self._device)
        self._runtime.ignore_captures()


def _told(session: Session, ticket: Ticket, error: RuntimeError | None = None) -> CommunicationError:
    """Returns the error of an operation that was under way when the communicator ended, or that ended it."""
    if session.ended and session.failed is None:
        return CommunicationError(f"{ticket.operation} was given up: {session.ended}")
    return session.failure(*ticket.told(), error, timed_out=False)
