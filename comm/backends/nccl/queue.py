"""Puts operations on a communicator's stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.backends.nccl.watchdog import Watchdog
from bagua_kernels.comm.backends.nccl.work import NcclWork, Ticket, told
from bagua_kernels.comm.failures.session import Session


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


class OperationQueue:
    """Puts operations on a communicator's stream, in between events of the caller's streams.

    Args:
        session: of the communicator.
        runtime: the GPU.
        endpoint: NCCL.
        device: where tensors are.
    """

    def __init__(self, session: Session, runtime: Runtime, endpoint: Endpoint, device: torch.device) -> None:
        self.endpoint = endpoint
        self.watchdog = Watchdog(session, endpoint.check, self._prepare_watchdog)
        self._session = session
        self._runtime = runtime
        self._device = device
        self._queued: dict[int, list[Message]] = {}

    def abort(self) -> None:
        """Gives up what is under way; may block as long as NCCL does."""
        self.watchdog.give_up()
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
                raise told(self._session, first, error) from error
            done = cuda.Event()
            done.record(stream)
        for ticket in tickets:
            ticket.event, ticket.captured = done, captured
            if not captured:
                self.watchdog.add(ticket)

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

    def _prepare_watchdog(self) -> None:
        self._runtime.cuda.set_device(self._device)
        self._runtime.ignore_captures()
