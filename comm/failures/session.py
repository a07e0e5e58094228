"""Waiting for operations: the timeout, and the error that says what happened and who is at fault."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from bagua_kernels.comm.failures.diagnosis import Diagnosis
from bagua_kernels.comm.failures.forked import FORKED
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.peer import MATCH, MismatchPeerError
from bagua_kernels.comm.work import CLOSED, Pending
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, LinkError, MismatchError, RankLostError

T = TypeVar("T")

# Between two looks at what other ranks reported; it also bounds how long Ctrl-C and `abort` take.
_SLICE = 0.25
_A_SLICE = timedelta(seconds=_SLICE)


class Session:
    """What all work of one communicator shares: how to name it, when to give up, and whether it has already failed.

    Args:
        name: of the communicator, for errors; the same on all its ranks.
        timeout: seconds.
        rank: this rank in the communicator.
        members: the communicator's ranks as numbers of the world, in order.
        liveness: tells who is at fault; None for errors without names.
        abandon: called once when an operation has failed.
        leaving: True while `close` waits for the other ranks.
        failed: the error of the first operation that has failed; None while none has.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        rank: int,
        members: tuple[int, ...],
        liveness: Liveness | None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.rank = rank
        self.members = members
        self.liveness = liveness
        self.ended = ""
        self.leaving = False
        self.abandon: Callable[[], None] | None = None
        self.failed: CommunicationError | None = None
        self._lock = threading.Lock()
        _sessions.add(self)

    def child(self, label: str, ranks: tuple[int, ...]) -> Session:
        """Returns the session of a communicator of some of the ranks."""
        members = tuple(self.members[rank] for rank in ranks)
        return Session(f"{self.name}/{label}", self.timeout, ranks.index(self.rank), members, self.liveness)

    def entered(self, number: int, operation: str) -> None:
        """Notes that operation `number` has started."""
        if self.liveness is not None:
            self.liveness.entered(self.name, number, operation)

    def finished(self, number: int | None) -> None:
        """Notes that it has finished."""
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
            raise self.failure(operation, number, peer, error, timed_out=_is_timeout(error)) from error

    def reported(self) -> bool:
        """Returns whether a failure is known that concerns this communicator: by a report, or since a rank has left."""
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
            timed_out: whether the time ran out, rather than a connection.
            missing: ranks whose messages were missing then, where the transport knows them.
        """
        what = f"{operation} #{number}" if number is not None else operation
        what += f" with rank {peer}" if peer is not None else ""
        with self._lock:
            if self.failed is not None:
                kind = type(self.failed)
                text = f"{what} cannot finish, since another operation failed: {self.failed}"
                return _with_ranks(kind, text, getattr(self.failed, "ranks", ()))
            others = self.members if peer is None else (self.members[self.rank], self.members[peer])
            # A transport may know at which rank it went wrong.
            cause = error.__cause__ if error else None
            broken_at = getattr(cause, "peer", None)
            diagnosis = self._mismatch(what, cause) if isinstance(cause, MismatchPeerError) else None
            if diagnosis is None and self.liveness is not None:
                beyond = [rank for rank in self.members if rank not in others]
                diagnosis = self.liveness.diagnose(
                    self.name,
                    others,
                    number,
                    operation,
                    timed_out=timed_out,
                    beyond=beyond,
                    broken=() if broken_at is None else (self.members[broken_at],),
                    leaving=self.leaving,
                )
                if diagnosis.kind == "unknown" and broken_at is not None and not timed_out:
                    diagnosis = self._broken_link(what, broken_at, diagnosis)
                if diagnosis.kind == "unknown" and timed_out and missing:
                    diagnosis = self._stalled(what, missing[0], diagnosis)
            said = "" if error is None else f" [cause: {_told(error)}]"
            at = peer if broken_at is None and timed_out else broken_at
            self.failed = self._describe(what, diagnosis, at, timed_out, said)
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

    def _describe(
        self, what: str, diagnosis: Diagnosis | None, peer: int | None, timed_out: bool, said: str
    ) -> CommunicationError:
        where = f"{what} of communicator {self.name!r}"
        ranks = [self.members.index(rank) for rank in diagnosis.ranks if rank in self.members] if diagnosis else []
        numbers = ", ".join(map(str, ranks))
        many = "ranks" if len(ranks) > 1 else "rank"
        if diagnosis is None or diagnosis.kind == "unknown":
            detail = (
                diagnosis.text if diagnosis else "the ranks keep no signs of life, so the rank at fault is not known"
            )
            if timed_out:
                text = (
                    f"{where} did not finish within {self.timeout:g} s: {detail}; raise timeout= to wait longer{said}"
                )
                return CollectiveTimeoutError(text, [] if peer is None else [peer])
            if peer is not None:
                return RankLostError(f"{where} failed at rank {peer}: {detail}{said}", [peer])
            return CommunicationError(f"{where} failed: {detail}{said}")
        reporter = f" (reported by world rank {diagnosis.by})" if diagnosis.by != self.members[self.rank] else ""
        if diagnosis.kind == "mismatch":
            return MismatchError(f"{where} failed{reporter}: {diagnosis.text}: {MATCH}", ranks)
        if diagnosis.kind == "link":
            return LinkError(
                f"{where} failed{reporter}: {diagnosis.text}; look at the network between their hosts{said}", ranks
            )
        if diagnosis.kind == "stalled":
            text = (
                f"{where} cannot finish{reporter}: {diagnosis.text}; look at the network between their hosts, or raise "
            )
            text += "timeout="
            return CollectiveTimeoutError(text + said, ranks)
        if self.members[self.rank] in diagnosis.ranks:
            text = f"{where} failed, for the others have given up this rank{reporter}: {diagnosis.text}{said}"
            return _with_ranks(CollectiveTimeoutError if diagnosis.kind == "late" else RankLostError, text, ranks)
        if diagnosis.kind == "late":
            how = f"did not finish within {self.timeout:g} s, waiting for" if timed_out else "cannot finish without"
            return CollectiveTimeoutError(
                f"{where} {how} {many} {numbers}{reporter}: {diagnosis.text}; make all ranks issue the same operations in "
                f"the same order (if ranks have different numbers of batches, use `model.join()`), or raise timeout={said}",
                ranks,
            )
        how = "left" if diagnosis.kind == "closed" else "was lost"
        return RankLostError(f"{many} {numbers} {how} during {where}{reporter}: {diagnosis.text}{said}", ranks)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget() -> None:
    for session in list(_sessions):
        session.forget()


os.register_at_fork(after_in_child=_forget)


class SessionWork(Pending):
    """One operation under way, of torch or of this package's own sockets: `handle` has the methods of torch's work."""

    def __init__(
        self,
        session: Session,
        handle: Any,
        operation: str,
        number: int | None,
        peer: int | None,
        finish: Callable[[], None] | None,
        on_stream: bool,
        missing: Callable[[], list[int]] | None = None,
    ) -> None:
        super().__init__()
        self._session = session
        self._handle = handle
        self._operation = operation
        self._number = number
        self._peer = peer
        self._finish = finish
        self._on_stream = on_stream
        self._missing = missing
        self._first_stream: torch.cuda.Stream | None = None
        self._noted = False

    def is_completed(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        return self._done or self._error is not None or bool(self._session.ended) or bool(self._handle.is_completed())

    def _complete(self) -> None:
        if self._on_stream:
            self._session.guard(self._operation, self._handle.wait, self._number, self._peer)
        else:
            self._wait_on_host()

    def _conclude(self) -> None:
        if self._finish is not None:
            if self._on_stream:
                self._first_stream = torch.cuda.current_stream()
            self._finish()
        self._session.finished(self._number)

    def _follow(self) -> None:
        if not self._on_stream:
            return
        if self._first_stream is None:
            self._session.guard(self._operation, self._handle.wait, self._number, self._peer)
        elif self._first_stream != torch.cuda.current_stream():
            # `finish` ran on the stream of the first wait.
            torch.cuda.current_stream().wait_stream(self._first_stream)

    def _wait_on_host(self) -> None:
        if self._peer is not None:
            self._session.waits(self._peer)
        try:
            self._wait_in_slices()
        finally:
            if self._peer is not None or self._noted:
                self._session.waits(None)

    def _wait_in_slices(self) -> None:
        session = self._session
        patience, now = session.patience(), time.monotonic()
        started = now if self._started is None else self._started
        left = started + patience - now
        while True:
            try:
                self._handle.wait(_A_SLICE if left >= _SLICE else timedelta(seconds=max(0.001, left)))
                return
            except RuntimeError as error:
                if session.ended and session.failed is None:
                    raise self._given_up() from None
                if self._handle.is_completed():
                    self._settle(error)
                    return
            if session.ended:
                raise self._fail(None, timed_out=False) if session.failed else self._given_up()
            if session.reported():
                raise self._fail(None, timed_out=False)
            missing = self._note_missing()
            if left <= _SLICE:
                raise self._fail(None, timed_out=True, missing=missing)
            left = started + patience - time.monotonic()

    def _note_missing(self) -> list[int]:
        """Returns the ranks whose messages are missing in a collective, where the transport knows them."""
        missing = self._missing() if self._missing is not None and self._peer is None else []
        if missing:
            self._noted = True
            self._session.waits(missing[0])
        return missing

    def _settle(self, error: RuntimeError) -> None:
        """Decides about an operation that is complete after `wait` raised: it may have finished right after."""
        try:
            self._handle.wait(timedelta(seconds=1))
        except RuntimeError as final:
            raise self._fail(final, timed_out=_is_timeout(final)) from final

    def _fail(self, error: Exception | None, *, timed_out: bool, missing: Sequence[int] = ()) -> CommunicationError:
        call = self._operation, self._number, self._peer
        return self._session.failure(*call, error, timed_out=timed_out, missing=missing)

    def _given_up(self) -> CommunicationError:
        return CommunicationError(f"{self._operation} was given up: {self._session.ended}")


def _is_timeout(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _told(error: Exception) -> str:
    """Returns the telling part of Gloo's message: neither where in its source it arose nor its good wishes."""
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", text).split(" This is typically")[0]


def _with_ranks(kind: type[CommunicationError], text: str, ranks: Any) -> CommunicationError:
    if issubclass(kind, (RankLostError, CollectiveTimeoutError, MismatchError, LinkError)):
        return kind(text, ranks)
    return kind(text)
