"""Names the rank at fault when a communication fails.

A transport knows at best the address of a socket that closed. So every rank has a background thread that writes a
sign of life into a small key-value store of its own: a counter, and for each communicator the last operation that it
entered. A rank whose operation failed watches these signs for a moment. A counter that stands still belongs to a lost
rank; if all go on, a rank that has not entered the operation is late. The verdict goes into the store as a report
before the error is raised, and the first report wins: the ranks that raise and leave next are not taken for the
culprit by the others.

The signs are consulted only after a failure or a timeout, so that a rank whose interpreter pauses for a few seconds
is safe.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from bagua_kernels import knobs
from bagua_kernels.comm.verdict import Verdict

HOST = 0  # the rank whose process holds the store
_SILENT = 6.0  # heartbeats without a sign of life after which a rank counts as lost
_LINGER = 3.0  # heartbeats for which the store's host stays, so that the others read the last report
_CLOSED_KEPT = 32  # closed communicators whose progress is still published

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, value: int, /) -> int: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102


@dataclass
class _Sign:
    """The last sign of life of a rank.

    Attributes:
        beat: its number.
        changed: when it was first seen, by this rank's clock.
        moved: whether it was seen to follow another one, so that the rank was certainly alive just before `changed`.
        data: what the rank wrote.
    """

    beat: int
    changed: float
    moved: bool
    data: dict[str, Any]


class Liveness:
    """This rank's signs of life, and its view of the others'.

    Args:
        store: a client of its own: the background thread may block in it.
        rank: this process's rank in the world.
        size: the number of ranks in the world.
        heartbeat: seconds between two signs of life; by default `BAGUA_KERNELS_HEARTBEAT`.
        clock: seconds of a clock that never goes back.
        background: False leaves calling `beat` to the caller, for tests.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        heartbeat: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.heartbeat = knobs.HEARTBEAT.get() if heartbeat is None else heartbeat
        self._store = store
        self._clock = clock
        self._beats = 0
        self._progress: dict[str, tuple[int, str, bool]] = {}
        self._closed: list[str] = []
        self._waits: dict[str, int] = {}
        self._left = ""
        self._signs: dict[int, _Sign] = {}
        self._read_at = float("-inf")
        self._observe_until = float("-inf")
        self._in_call_since: float | None = None
        self._store_error = ""
        self._reports: list[Verdict] = []
        self._outgoing: list[Verdict] = []
        self._noting = threading.Lock()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.beat()
        if background:
            self._thread = threading.Thread(target=self._run, name="bagua_kernels liveness", daemon=True)
            self._thread.start()
            atexit.register(self._stop_at_exit)

    def entered(self, communicator: str, number: int, operation: str) -> None:
        """Notes that this rank has started operation `number` of a communicator."""
        with self._noting:
            self._progress[communicator] = (number, operation, False)

    def finished(self, communicator: str, number: int) -> None:
        """Notes that this rank has finished it."""
        # Another thread may start the next one meanwhile, which must not be taken back.
        with self._noting:
            last = self._progress.get(communicator)
            if last is not None and last[0] == number:
                self._progress[communicator] = (number, last[1], True)

    def waits(self, communicator: str, peer: int | None) -> None:
        """Notes that this rank waits for a message from, or to, rank `peer` of the world, or that it does no more."""
        if peer is None:
            self._waits.pop(communicator, None)
        else:
            self._waits[communicator] = peer

    def closed(self, communicator: str) -> None:
        """Notes that this rank uses a communicator no more, and tells the others soon."""
        number, _, _ = self._progress.get(communicator, (-1, "", True))
        self._progress[communicator] = (number, "closed", True)
        self._closed.append(communicator)
        if len(self._closed) > _CLOSED_KEPT:
            self._progress.pop(self._closed.pop(0), None)
        self._wake.set()

    def gave_up(self, communicator: str, reason: str) -> None:
        """Tells the others soon that this rank will use a communicator no more, though its connections stay."""
        text = f"rank {self.rank} gave up: {reason}"
        self._outgoing.append(Verdict("closed", (self.rank,), text, communicator, self.rank))
        self._wake.set()

    def observe(self) -> None:
        """Keeps an eye on the others for the next heartbeats, so that a verdict is quick if one is needed."""
        self._observe_until = self._clock() + 4 * self.heartbeat

    def reported(self, communicator: str, members: Sequence[int]) -> Verdict | None:
        """Returns the first report that concerns a communicator; asks only this process's memory."""
        return next((report for report in list(self._reports) if report.concerns(communicator, members)), None)

    def diagnose(
        self,
        communicator: str,
        members: Sequence[int],
        number: int | None,
        operation: str,
        *,
        timed_out: bool,
        beyond: Sequence[int] = (),
    ) -> Verdict:
        """Finds out why an operation failed; takes up to about seven heartbeats, never more than fourteen.

        Args:
            communicator: its name.
            members: its ranks, as numbers of the world.
            number: which operation of it failed; None for one that has no number (send and receive).
            operation: its name.
            timed_out: that nothing else than the time speaks against the other ranks: no connection broke.
            beyond: ranks that take no part, but may be what a member waits for.

        Returns:
            The verdict, which has been reported to the other ranks unless it is "unknown".
        """
        since = self._clock()
        self._wake.set()
        while True:
            self.observe()
            verdict = self.judge(communicator, members, number, operation, since, timed_out, beyond)
            if verdict is not None:
                break
            with self._changed:
                self._changed.wait(self.heartbeat / 2)
        if verdict.kind == "unknown" or verdict in self._reports:
            return verdict
        if self._store_trouble(since):
            return verdict
        self._outgoing.append(verdict)
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: verdict not in self._outgoing, timeout=_LINGER * self.heartbeat)
        return self.reported(communicator, members) or verdict

    def judge(
        self,
        communicator: str,
        members: Sequence[int],
        number: int | None,
        operation: str,
        since: float,
        timed_out: bool,
        beyond: Sequence[int] = (),
    ) -> Verdict | None:
        """Returns the verdict on an operation that failed at time `since`, or None while the signs do not suffice."""
        report = self.reported(communicator, members)
        if report is not None:
            return report
        now, silence = self._clock(), _SILENT * self.heartbeat

        def verdict(kind: Literal["lost", "closed", "late", "unknown"], found: dict[int, str]) -> Verdict:
            text = "; ".join(found.values())
            return Verdict(kind, tuple(rank for rank in found if rank >= 0), text, communicator, self.rank)

        if how := self._store_trouble(since):
            if self.rank != HOST and (HOST in members or (timed_out and HOST in beyond)):
                return verdict("lost", {HOST: f"rank {HOST} holds the liveness store, which cannot be reached: {how}"})
            return verdict("unknown", {-1: f"the liveness store on rank {HOST} cannot be reached: {how}"})

        others = [rank for rank in members if rank != self.rank]
        if self._read_at < since or any(rank not in self._signs for rank in others):
            return self._undecided(now, since, communicator)
        signs = {rank: self._signs[rank] for rank in others}
        left = {rank: f"rank {rank} left: {sign.data['left']}" for rank, sign in signs.items() if sign.data["left"]}
        if left:
            return self._cause(left) or verdict("lost", left)
        doing = {rank: sign.data["doing"].get(communicator) for rank, sign in signs.items()}
        closed = {
            rank: f"rank {rank} has closed this communicator"
            for rank in others
            if doing[rank] and doing[rank][1] == "closed"
        }
        if closed:
            return verdict("closed", closed)
        # Whoever waits in vain for a rank that answers may be waiting for what that one waits for.
        for watched in (others, [rank for rank in beyond if timed_out and rank in self._signs]):
            silent = {
                rank: f"rank {rank} gave no sign of life for {now - self._signs[rank].changed:.1f} s; at the last one "
                f"it was {_describe(self._signs[rank].data['doing'].get(communicator))}"
                for rank in watched
                if now - self._signs[rank].changed > silence
            }
            if silent:
                return self._cause(silent) or verdict("lost", silent)
        # Where a connection broke, only a beat made after that proves life; readings are up to a beat apart.
        proof = since - 2 * self.heartbeat if timed_out else since + 1.5 * self.heartbeat
        if not all(sign.moved and sign.changed > proof for sign in signs.values()):
            return self._undecided(now, since, communicator)
        if number is None and len(others) == 1:
            return self._end_of_chain(others, communicator, verdict)
        if number is None:
            return verdict("unknown", {-1: "every rank still answers; which of several peers is missing is not known"})
        late = {
            rank: f"rank {rank} answers but is not in it: it is {_describe(doing[rank])}"
            for rank in others
            if doing[rank] is None
            or doing[rank][0] < number
            or (doing[rank][0] == number and doing[rank][1] != operation)
        }
        return (
            verdict("late", late) if late else verdict("unknown", {-1: "every rank still answers and has entered it"})
        )

    def _cause(self, gone: dict[int, str]) -> Verdict | None:
        """Returns what ranks that are gone had reported before: who goes because others were lost is not to blame."""
        return next((report for report in list(self._reports) if report.kind == "lost" and report.by in gone), None)

    def _end_of_chain(
        self, others: list[int], communicator: str, verdict: Callable[[Any, dict[int, str]], Verdict]
    ) -> Verdict:
        """Names the rank for which, from one to the next, all wait whose messages do not come."""
        culprit, seen = others[0], {self.rank}
        while culprit not in seen and culprit in self._signs:
            following = self._signs[culprit].data["waits"].get(communicator)
            if following is None:
                told = f"rank {culprit} answers, but has not sent or received what others wait for"
                return verdict("late", {culprit: told})
            seen.add(culprit)
            culprit = following
        return verdict("unknown", {-1: "every rank still answers, and they wait for one another"})

    def stop(self, reason: str) -> None:
        """Says goodbye to the other ranks and ends the background thread; bounded by a few heartbeats."""
        if self._left:
            return
        self._left = reason
        if self._thread is None:
            self.beat()
            return
        atexit.unregister(self._stop_at_exit)
        self._wake.set()
        self._thread.join((_LINGER + 2) * self.heartbeat)
        if self._thread.is_alive():
            _log.debug("the liveness store did not answer while rank %d left", self.rank)

    def beat(self) -> None:
        """One round with the store: own sign of life, own report, others' reports and, while observing, others' signs.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        self._beats += 1
        self._in_call_since = self._clock()
        doing, waits = dict(self._progress), dict(self._waits)
        sign = {"beat": self._beats, "left": self._left, "doing": doing, "waits": waits}
        self._store.set(f"beat/{self.rank}", json.dumps(sign))
        # Signs before reports: whoever is seen to have left has written its report before that.
        if self._clock() < self._observe_until:
            self._read_signs()
        self._read_reports()
        while self._outgoing:
            self._report(self._outgoing[0])
            del self._outgoing[0]
        self._in_call_since = None
        with self._changed:
            self._changed.notify_all()

    def _read_reports(self) -> None:
        while self._store.check([f"report/{len(self._reports)}"]):
            self._take_report(self._store.get(f"report/{len(self._reports)}"))

    def _report(self, verdict: Verdict) -> None:
        """Writes a report into the first free place, unless one before it explains the same failure."""
        text = json.dumps(asdict(verdict))
        while not any(report.concerns(verdict.communicator, verdict.ranks) for report in self._reports):
            self._take_report(self._store.compare_set(f"report/{len(self._reports)}", "", text))

    def _take_report(self, text: bytes) -> None:
        fields = json.loads(text)
        self._reports.append(Verdict(**{**fields, "ranks": tuple(fields["ranks"])}))

    def _read_signs(self) -> None:
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        # All keys exist: every rank writes its first sign before any rank communicates.
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        now = self._clock()
        # A gap in the observation, such as a pause of this interpreter, says nothing about the others: they start anew.
        gap = now - self._read_at > 2.5 * self.heartbeat
        for rank, value in zip(ranks, values, strict=True):
            data = json.loads(value)
            last = self._signs.get(rank)
            if last is None or gap or last.beat != data["beat"]:
                self._signs[rank] = _Sign(data["beat"], now, last is not None and not gap, data)
        self._read_at = now

    def _store_trouble(self, since: float) -> str:
        """Returns what is wrong with the store, or an empty text; `since` is when the operation failed."""
        started, now = self._in_call_since, self._clock()
        if self._store_error or started is None:
            return self._store_error
        # Up to a heartbeat after the failure, a pause of this process's own interpreter may be why a call is not back.
        blocked = now - started > _SILENT * self.heartbeat and now - since > self.heartbeat
        return f"no answer for {now - started:.1f} s" if blocked else ""

    def _undecided(self, now: float, since: float, communicator: str) -> Verdict | None:
        if now - since < 2 * _SILENT * self.heartbeat:
            return None
        return Verdict("unknown", (), "the signs of life do not tell who failed", communicator, self.rank)

    def _run(self) -> None:
        try:
            while not self._left:
                self._wake.wait(self.heartbeat)
                self._wake.clear()
                self.beat()
            self._leave()
        except RuntimeError as error:
            # The host has gone, or the network to it: what is known by now is what a verdict rests on.
            self._store_error = str(error).splitlines()[0] if str(error) else type(error).__name__
            with self._changed:
                self._changed.notify_all()

    def _leave(self) -> None:
        gone = self._store.add("left", 1)
        deadline = self._clock() + _LINGER * self.heartbeat
        while self.rank == HOST and gone < self.size and self._clock() < deadline:
            time.sleep(self.heartbeat / 20)
            gone = self._store.add("left", 0)

    def _stop_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        after = f" after {type(error).__name__}: {error}" if error is not None else ""
        self.stop(f"its process exited{after}")


def _describe(doing: list[Any] | None) -> str:
    if not doing:
        return "before its first operation"
    number, operation, done = doing
    return f"{'after' if done else 'in'} {operation} #{number}"
