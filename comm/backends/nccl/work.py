"""Operations that run on a stream: waiting for them without the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CommunicationError

_PAUSE = 0.005  # seconds between two looks at an operation for which the host waits


@dataclass
class Ticket:
    """One operation, as its work and the watch see it.

    Attributes:
        operation: its name.
        number: its number; None if not all ranks take part.
        peers: the other ranks that take part; empty for all.
        event: recorded on the stream behind it; None until it is issued.
        captured: True if it went into a CUDA graph, so that the event must not be queried.
        lost: True if it was under way when the communicator was given up; its event comes nevertheless.
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


@dataclass(eq=False, repr=False)
class NcclWork(Pending):
    """One operation of NCCL under way, or waiting to be issued.

    Attributes:
        session: of the communicator.
        ticket: the operation.
        current_stream: returns the stream that is to wait.
        record_stream: marks a tensor's memory as used by a stream, for the allocator.
        tensors: kept from being freed until then; within a CUDA graph nothing else keeps them.
        finish: completes the outputs, on that stream.
        issue: issues the operation if that has not been done.
    """

    session: Session
    ticket: Ticket
    current_stream: Callable[[], Any]
    record_stream: Callable[[torch.Tensor, Any], None]
    tensors: list[torch.Tensor]
    finish: Callable[[], None] | None = None
    issue: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._first_stream: Any = None

    def is_completed(self) -> bool:
        """Returns True if the operation has finished on the GPU; true of one in a CUDA graph, which runs later."""
        if self._done or self._error is not None or self.session.ended:
            return True
        self._make_sure_of_issue()
        return self.ticket.captured or bool(self.ticket.event.query())

    def _complete(self) -> None:
        ticket, session = self.ticket, self.session
        if not session.ended:
            self._make_sure_of_issue()
        if ticket.error is not None:
            raise ticket.error
        if ticket.event is None:
            raise told(session, ticket)
        # First the event, then the mark: an abort sets the mark before it makes the event come.
        finished = not session.ended or ticket.captured or ticket.event.query()
        if ticket.lost or not finished:
            raise told(session, ticket)

    def _conclude(self) -> None:
        ticket = self.ticket
        stream = self._first_stream = self.current_stream()
        stream.wait_event(ticket.event)
        if self.finish is not None:
            self.finish()
        if not ticket.captured:
            # This may not be the stream that a temporary was made on, which could otherwise use its memory at once.
            for tensor in self.tensors:
                self.record_stream(tensor, stream)
        self.tensors = []

    def _follow(self) -> None:
        stream = self.current_stream()
        if stream == self._first_stream:
            return
        # `finish` ran on the stream of the first wait.
        stream.wait_event(self.ticket.event if self.finish is None else self._first_stream.record_event())

    def wait_on_host(self) -> None:
        """Blocks the caller until the operation has finished on the GPU; errors as of `wait`."""
        self.wait()
        while not (self.ticket.lost or self.ticket.event.query()):
            # The watch gives the operation up when time is up.
            time.sleep(_PAUSE)
        if self.ticket.lost:
            raise self.ticket.error or told(self.session, self.ticket)

    def _make_sure_of_issue(self) -> None:
        if self.ticket.event is None and self.issue is not None:
            self.issue()


def told(session: Session, ticket: Ticket, error: RuntimeError | None = None) -> CommunicationError:
    """Returns the error of an operation that was under way when the communicator ended, or that ended it."""
    if session.ended and session.failed is None:
        return CommunicationError(f"{ticket.operation} was given up: {session.ended}")
    return session.failure(*ticket.told(), error, timed_out=False)
