"""Waiting for operations: the timeout, and the error with the cause and the ranks at fault."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bagua_kernels.comm.failures.diagnose import FailedOperation
from bagua_kernels.comm.failures.failure import (
    Diagnosis,
    Failure,
    MismatchPeerError,
    cause_text,
    different_calls,
    is_timeout,
    with_ranks,
)
from bagua_kernels.comm.failures.forked import FORKED, forget_after_fork
from bagua_kernels.comm.failures.heartbeat import OPENING
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.stillness import Stillness, Stir
from bagua_kernels.comm.work import CLOSED
from bagua_kernels.errors import CommunicationError, culprits_of

T = TypeVar("T")

_MOMENT = 1.0  # seconds for a farewell after a failure
# Parts of the timeout that are left of a wait when the first and the last rank begin to read what the others do. The last
# number is how many times they would read that in a timeout. The first readings of 64 ranks cost rank 0 half a megabyte in all.
_LATE, _LATEST, _READINGS = 0.5, 0.125, 16


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
        begun: operations that this rank has begun in it.
        moves: returns the bytes of its operations that have left or arrived here, where the transport knows them.
        heard: returns when something last came from other ranks, where the transport knows it.
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
        self._due: float | None = None
        self.begun = 0
        self.moves: Callable[[], int] = int
        self.heard: Callable[[], Mapping[int, float]] = dict
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        forget_after_fork(self)
        if self.liveness is not None:
            self.liveness.follow(self)

    def child(self, label: str, ranks: tuple[int, ...]) -> Session:
        """Returns the session of a communicator of some of the ranks."""
        members = tuple(self.members[rank] for rank in ranks)
        return Session(f"{self.name}/{label}", self.timeout, ranks.index(self.rank), members, self.liveness)

    def enter(self, operation: str, call: str = "") -> int:
        """Returns the number of a collective that starts now, the same on all ranks.

        Args:
            operation: its name.
            call: see `Communicator.call`.
        """
        number = next(self._numbers)
        if self.liveness is not None:
            self.liveness.entered(self.name, number, operation, call)
        return number

    def begin(self) -> None:
        """Counts an operation that begins now, with or without a number."""
        self.begun += 1
        if self.liveness is not None:
            self.liveness.begun += 1

    def moved(self) -> int:
        """Returns the bytes of operations that have left or arrived at this rank."""
        return self.moves()

    def look(self, still: Stillness, peer: int | None, moved: int, now: float) -> None:
        """Notes whether anything has moved of what an operation waits for.

        Args:
            still: of that wait.
            peer: the only other rank that takes part; None for a collective.
            moved: bytes of the operation that have left or arrived here.
            now: the time, by the clock of the wait.
        """
        still.own(moved, now)
        still.other(self._me, Stir(self.moves(), self.begun), now)
        left = self.left(still.since(), now)
        # One after the other, so that the store does not answer all of them at the same time.
        late = _LATE - (_LATE - _LATEST) * self.rank / len(self.members)
        if self.liveness is not None and left < late * self.timeout:
            # Heartbeats contain when something moved. Therefore they are read late, and more often towards the end.
            age = max(self.liveness.heartbeat, min(self.timeout / _READINGS, left / 2))
            if self.liveness.inquire(age) < still.started:
                return
            awaited = self.members if peer is None else (self.members[peer],)
            for rank, stir in self.liveness.stirs(self.name, awaited).items():
                still.other(rank, stir, now)

    def finished(self, number: int | None) -> None:
        """Notes that operation `number` has finished."""
        if self.liveness is not None and number is not None:
            self.liveness.finished(self.name, number)
            if self.liveness.blamed:
                # They have come after all.
                self.liveness.blamed.difference_update(self.members)

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
        self.moves, self.heard = int, dict
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

    def is_over(self, left: float) -> bool:
        """Returns True if so little is left of a wait that its time counts as over: another rank's ran out just before."""
        return self.liveness is not None and left <= 4 * self.liveness.heartbeat and left < self.timeout / 4

    def left(self, started: float, now: float | None = None) -> float:
        """Returns the seconds that are left of the patience for what began, or last moved, at a time of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        patience, left = self.patience(), started + self.timeout - now
        if self._due is not None:
            left = min(left, self._due - now)
        return max(0.001, left - (self.timeout - patience))

    def hurry(self, limit: float | None) -> None:
        """Shortens the timeout for a farewell.

        Args:
            limit: seconds; None for the timeout. It is a moment where a member was named as lost or late: it may not come.
        """
        if self._blamed():
            assert self.liveness is not None
            moment = max(_MOMENT, 2 * self.liveness.heartbeat)
            limit = moment if limit is None else min(limit, moment)
        if limit is not None:
            self.timeout = min(limit, self.timeout)
            self._due = time.monotonic() + self.timeout

    def _blamed(self) -> list[int]:
        """Returns the members that an error here has named as lost or late, as numbers of the world."""
        return [] if self.liveness is None else sorted(self.liveness.blamed.intersection(self.members))

    @contextlib.contextmanager
    def within(self, deadline: float) -> Iterator[None]:
        """Lets all waits in the block end at a time of `time.monotonic`, for they are parts of one operation."""
        before = self._due
        self._due = deadline if before is None else min(before, deadline)
        try:
            yield
        finally:
            self._due = before

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
        progress: str = "",
        still: float | None = None,
    ) -> CommunicationError:
        """Returns the error to raise for an operation that failed, and ends the communicator.

        Args:
            operation: its name.
            number: its number; None for send and receive.
            peer: the only other rank that took part; None for a collective.
            error: what the transport raised, if it did.
            timed_out: True if the time ran out, rather than a connection.
            missing: ranks whose messages were missing then, where the transport knows them.
            progress: how much of it had moved, in words; may be empty.
            still: when something of it last moved, by `time.monotonic`, if the time ran out.
        """
        what = operation if number is None or number == OPENING else f"{operation} #{number}"
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
            diagnosis = self._mismatch(what, number, cause) if isinstance(cause, MismatchPeerError) else None
            if diagnosis is None and self.leaving and timed_out and (blamed := self._blamed()):
                # Named before, it needs no other diagnosis, which takes seconds.
                told = f"rank {', '.join(map(str, blamed))} was named in an error before"
                diagnosis = Diagnosis("late", tuple(blamed), told, self.name, self._me)
            elif diagnosis is None and self.liveness is not None:
                beyond = [rank for rank in self.members if rank not in others]
                broken = () if broken_at is None else (self.members[broken_at],)
                since = self.liveness.clock()
                heard = {self.members[rank]: at for rank, at in self.heard().items()}
                call = self.liveness.call(self.name)
                case = FailedOperation(
                    self.name,
                    others,
                    number,
                    operation,
                    since,
                    timed_out,
                    beyond,
                    broken,
                    still=still,
                    heard=heard,
                    call=call,
                )
                diagnosis = self.liveness.diagnose(case, leaving=self.leaving)
                if diagnosis.kind == "unknown" and broken_at is not None and not timed_out:
                    diagnosis = self._broken_link(what, broken_at, diagnosis)
                if diagnosis.kind == "unknown" and timed_out and missing and "still answer" in diagnosis.text:
                    diagnosis = self._stalled(what, missing[0], diagnosis)
                elif diagnosis.kind == "unknown" and timed_out and missing:
                    # They may be waiting for others themselves, so that they are no more than a trace.
                    lacking = f"messages to or from ranks {', '.join(map(str, missing))} are missing here"
                    progress = f"{progress}; {lacking}" if progress else lacking
            failure = Failure(
                f"{what} of communicator {self.name!r}",
                self.members,
                self._me,
                self.timeout,
                peer if broken_at is None and timed_out else broken_at,
                timed_out,
                f" [{progress}]" * bool(progress) + ("" if error is None else f" [cause: {cause_text(error)}]"),
            )
            self.failed = failure.error(diagnosis)
            if self.liveness is not None:
                self.liveness.blamed.update(
                    self.members[rank] for rank in culprits_of(self.failed) if rank != self.rank
                )
            self.ended = self.ended or f"{self.failed}"
            if self.abandon is not None:
                self.abandon()
            return self.failed

    def _mismatch(self, what: str, number: int | None, cause: MismatchPeerError) -> Diagnosis:
        ranks = sorted((self.rank, cause.peer))
        text = f"in {what} rank {cause.peer} {cause.theirs} where rank {self.rank} {cause.ours}"
        if self.liveness is not None:
            calls = self.liveness.calls(self.name, number or 0, [self.members[rank] for rank in ranks])
            text += different_calls({self.members.index(rank): call for rank, call in calls.items()})
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
        text = f"nothing came through the connection between ranks {a} and {b} in {what} for {self.timeout:g} s, "
        text += "though both still run and entered it"
        return self._report(Diagnosis("stalled", (self.members[a], self.members[b]), text, self.name, self._me))

    @property
    def _me(self) -> int:
        return self.members[self.rank]

    def _report(self, diagnosis: Diagnosis) -> Diagnosis:
        return diagnosis if self.liveness is None else self.liveness.report(diagnosis, self.members)
