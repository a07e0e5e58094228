"""Waiting for operations: the timeout, and the error with the cause and the ranks at fault."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bagua_kernels.comm.failures.diagnose import FailedOperation
from bagua_kernels.comm.failures.failure import (
    Diagnosis,
    Failure,
    MismatchPeerError,
    cause_text,
    is_timeout,
    with_ranks,
)
from bagua_kernels.comm.failures.forked import FORKED, forget_after_fork
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.work import CLOSED
from bagua_kernels.errors import CommunicationError

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Session:
    """What all work of one communicator shares: how to name it, when to give up, and whether it has already failed.

    Attributes:
        name: of the communicator, for errors; the same on all its ranks.
        timeout: seconds.
        rank: this rank in the communicator.
        members: the communicator's ranks as numbers of the world, in order.
        liveness: finds the ranks at fault; None for errors without names.
        abandon: called once when an operation has failed.
        leaving: True while `close` waits for the other ranks.
        failed: the error of the first operation that has failed; None while none has.
    """

    name: str
    timeout: float
    rank: int
    members: tuple[int, ...]
    liveness: Liveness | None

    def __post_init__(self) -> None:
        self.ended = ""
        self.leaving = False
        self.abandon: Callable[[], None] | None = None
        self.failed: CommunicationError | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        forget_after_fork(self)

    def child(self, label: str, ranks: tuple[int, ...]) -> Session:
        """Returns the session of a communicator of some of the ranks."""
        members = tuple(self.members[rank] for rank in ranks)
        return Session(f"{self.name}/{label}", self.timeout, ranks.index(self.rank), members, self.liveness)

    def enter(self, operation: str) -> int:
        """Returns the number of a collective that starts now, the same on all ranks."""
        number = next(self._numbers)
        if self.liveness is not None:
            self.liveness.entered(self.name, number, operation)
        return number

    def finished(self, number: int | None) -> None:
        """Notes that operation `number` has finished."""
        if self.liveness is not None and number is not None:
            self.liveness.finished(self.name, number)

    def close(self) -> None:
        """Makes every later call fail, after all ranks are through with the communicator."""
        self.ended = self.ended or CLOSED
        if self.liveness is not None:
            self.liveness.closed(self.name)

    def abort(self, reason: str) -> None:
        """Makes pending work and every later call fail, here and, unless it has failed anyway, on the other ranks."""
        if not self.ended and self.liveness is not None:
            self.liveness.gave_up(self.name, reason)
        self.ended = self.ended or reason

    def forget(self) -> None:
        """Ends the session of a forked child, which has neither the threads nor the connections."""
        self.ended = self.ended or FORKED
        self.liveness = self.abandon = None
        self._lock = threading.Lock()

    def waits(self, peer: int | None) -> None:
        """Notes that this rank waits for rank `peer`, or that it does no more."""
        if self.liveness is not None:
            # A rank that leaves has no more to do: those that wait for it wait for nobody else.
            at = None if peer is None or self.leaving else self.members[peer]
            self.liveness.waits(self.name, at)

    def patience(self) -> float:
        """Seconds to wait, such that the diagnosis on who is at fault is there when the timeout is over."""
        beat = 0.0 if self.liveness is None else self.liveness.heartbeat
        return self.timeout - min(2 * beat, self.timeout / 4)

    def guard(self, operation: str, call: Callable[[], T], number: int | None = None, peer: int | None = None) -> T:
        """Returns what `call` returns; turns errors of the transport into this package's."""
        try:
            return call()
        except RuntimeError as error:
            raise self.failure(operation, number, peer, error, timed_out=is_timeout(error)) from error

    def reported(self) -> bool:
        """Returns True if a failure is known that concerns this communicator: by a report, or since a rank has left."""
        if self.liveness is None:
            return False
        self.liveness.observe()
        reported = self.liveness.reported(self.name, self.members) is not None
        return reported or self.liveness.missed(self.name, self.members)

    def failure(
        self,
        operation: str,
        number: int | None,
        peer: int | None,
        error: Exception | None,
        *,
        timed_out: bool,
        missing: Sequence[int] = (),
    ) -> CommunicationError:
        """Returns the error to raise for an operation that failed, and ends the communicator.

        Args:
            operation: its name.
            number: its number; None for send and receive.
            peer: the only other rank that took part; None for a collective.
            error: what the transport raised, if it did.
            timed_out: True if the time ran out, rather than a connection.
            missing: ranks whose messages were missing then, where the transport knows them.
        """
        what = f"{operation} #{number}" if number is not None else operation
        what += f" with rank {peer}" if peer is not None else ""
        with self._lock:
            if self.failed is not None:
                kind = type(self.failed)
                text = f"{what} cannot finish, since another operation failed: {self.failed}"
                return with_ranks(kind, text, getattr(self.failed, "ranks", ()))
            others = self.members if peer is None else (self.members[self.rank], self.members[peer])
            # A transport may know at which rank it went wrong.
            cause = error.__cause__ if error else None
            broken_at = getattr(cause, "peer", None)
            diagnosis = self._mismatch(what, cause) if isinstance(cause, MismatchPeerError) else None
            if diagnosis is None and self.liveness is not None:
                beyond = [rank for rank in self.members if rank not in others]
                broken = () if broken_at is None else (self.members[broken_at],)
                since = self.liveness.clock()
                case = FailedOperation(self.name, others, number, operation, since, timed_out, beyond, broken)
                diagnosis = self.liveness.diagnose(case, leaving=self.leaving)
                if diagnosis.kind == "unknown" and broken_at is not None and not timed_out:
                    diagnosis = self._broken_link(what, broken_at, diagnosis)
                if diagnosis.kind == "unknown" and timed_out and missing:
                    diagnosis = self._stalled(what, missing[0], diagnosis)
            failure = Failure(
                f"{what} of communicator {self.name!r}",
                self.members,
                self._me,
                self.timeout,
                peer if broken_at is None and timed_out else broken_at,
                timed_out,
                "" if error is None else f" [cause: {cause_text(error)}]",
            )
            self.failed = failure.error(diagnosis)
            self.ended = self.ended or f"{self.failed}"
            if self.abandon is not None:
                self.abandon()
            return self.failed

    def _mismatch(self, what: str, cause: MismatchPeerError) -> Diagnosis:
        ranks = sorted((self.rank, cause.peer))
        text = f"in {what} rank {cause.peer} {cause.theirs} where rank {self.rank} {cause.ours}"
        return self._report(Diagnosis("mismatch", tuple(self.members[r] for r in ranks), text, self.name, self._me))

    def _broken_link(self, what: str, peer: int, unknown: Diagnosis) -> Diagnosis:
        if self.liveness is None or "still answers" not in unknown.text:
            return unknown
        ranks = sorted((self.rank, peer))
        text = f"the connection between ranks {ranks[0]} and {ranks[1]} broke in {what}, though both still run"
        return self._report(Diagnosis("link", tuple(self.members[r] for r in ranks), text, self.name, self._me))

    def _stalled(self, what: str, missing: int, unknown: Diagnosis) -> Diagnosis:
        """Follows who waits for whom to two ranks of which one waits for the other, which waits for it or for nobody."""
        assert self.liveness is not None
        waiting, peer, passed = self._me, self.members[missing], {self._me}
        while (following := self.liveness.waited_for(self.name, peer)) not in (None, waiting):
            if peer in passed:
                return unknown
            passed.add(peer)
            assert following is not None
            waiting, peer = peer, following
        a, b = sorted(self.members.index(rank) for rank in (waiting, peer))
        text = f"nothing came through the connection between ranks {a} and {b} in {what}, though both still run and entered it"
        return self._report(Diagnosis("stalled", (self.members[a], self.members[b]), text, self.name, self._me))

    @property
    def _me(self) -> int:
        return self.members[self.rank]

    def _report(self, diagnosis: Diagnosis) -> Diagnosis:
        return diagnosis if self.liveness is None else self.liveness.report(diagnosis, self.members)
