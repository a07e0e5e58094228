"""Names the rank at fault when a communication fails.

A transport knows at best the address of a socket that closed. Therefore every rank has a background thread that writes a
heartbeat into its own small key-value store. A heartbeat has a counter, the process, and the last operation in each
communicator. A rank whose operation failed watches these signs for a moment. A counter that stands still
belongs to a lost rank; if all go on, a rank that has not entered the operation is late. The diagnosis goes into the store
as a report before the error is raised, and the first report wins: the ranks that raise and leave next are not taken for
the culprit by the others.

While an operation is under way, silence alone counts for nothing, so that a rank whose interpreter pauses for a few
seconds is safe. Only what leaves no doubt is acted on: a farewell, or a process that the operating system of the same
host no longer knows. Connections do not show this if a forked child holds copies of them.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from bagua_kernels import knobs
from bagua_kernels.comm.failures.board import Board, Store
from bagua_kernels.comm.failures.diagnose import HOST as HOST
from bagua_kernels.comm.failures.diagnose import SILENT, FailedOperation, Trouble, View, diagnose, ended_text
from bagua_kernels.comm.failures.failure import Diagnosis
from bagua_kernels.comm.failures.forked import FORKED, forget_after_fork
from bagua_kernels.comm.failures.heartbeat import NOTHING, Doing, Heartbeat, describe
from bagua_kernels.comm.failures.records import FIELDS, SIGNS
from bagua_kernels.comm.failures.records import NOTHING as NO_HEARTBEATS
from bagua_kernels.comm.failures.stillness import Stir
from bagua_kernels.comm.joining.evidence import Process

_LINGER = 3.0  # heartbeats for which a rank that leaves waits for the store
_LAST_WORD = 5.0  # seconds for which the store's host stays, so that the others read the last report
_CLOSED_KEPT = 32  # closed communicators whose progress is still published
_QUIET = 10.0  # seconds without the store before this rank logs it; at the end of a job it may go first
_LONGEST_PAUSE = 5.0  # seconds between two tries to connect to the store again
_GRACE = 2.0  # heartbeats after a rank has gone in which what it sent before may still arrive

_log = logging.getLogger(__name__)


class Mover(Protocol):
    """What moves bytes of operations."""

    def moved(self) -> int:
        """Returns the bytes that have left or arrived so far; from any thread."""


class Liveness:
    """This rank's heartbeats, and its view of the others'.

    Args:
        store: a client of its own: the background thread may block in it.
        rank: this process's rank in the world.
        size: the number of ranks in the world.
        heartbeat: seconds between two heartbeats; by default `BAGUA_KERNELS_HEARTBEAT`.
        clock: seconds of a clock that never goes back.
        reconnect: opens the store's connection anew after it broke; raises RuntimeError or OSError where it cannot. None if
            there is no way to do so.
        background: False leaves calling `beat` to the caller, for tests.
        process: the rank's process; by default this one.

    Attributes:
        clock: as given.
        begun: operations that this rank has begun so far, of all communicators and mailboxes.
        blamed: ranks that errors here have named as lost or late.
        release: called by `stop` at its end, to free the store; a call of the store that is under way then ends.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        heartbeat: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        reconnect: Callable[[], object] | None = None,
        background: bool = True,
        process: Process | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.heartbeat = knobs.HEARTBEAT.get() if heartbeat is None else heartbeat
        self.release: Callable[[], object] | None = None
        self._board = Board(store, rank, size, self.heartbeat, clock)
        self.clock = clock
        self.blamed: set[int] = set()
        self.begun = 0
        self._moved = 0
        # What each had moved when it was last asked.
        self._movers: weakref.WeakKeyDictionary[Mover, int] = weakref.WeakKeyDictionary()
        self._beats = 0
        self._process = process or Process.current()
        self._ended: dict[int, float] = {}
        self._progress: dict[str, Doing] = {}
        self._closed: list[str] = []
        self._waits: dict[str, int] = {}
        self._left = ""
        self._said_goodbye = False
        self._observe_until = float("-inf")
        self._read_by = float("inf")
        self._in_call_since: float | None = None
        self._trouble: Trouble | None = None
        self._outgoing: list[Diagnosis] = []
        self._noting = threading.Lock()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._reconnect = reconnect
        self._thread: threading.Thread | None = None
        self.beat()
        if background:
            self._thread = threading.Thread(target=self._run, name="bagua_kernels liveness", daemon=True)
            self._thread.start()
            atexit.register(self._stop_at_exit)
            forget_after_fork(self)

    def entered(self, communicator: str, number: int, operation: str, call: str = "") -> None:
        """Notes that this rank has started operation `number` of a communicator, in a method of its user."""
        with self._noting:
            self._progress[communicator] = (number, operation, False, call)

    def finished(self, communicator: str, number: int) -> None:
        """Notes that this rank has finished it."""
        # Another thread may start the next one meanwhile, which must not be taken back.
        with self._noting:
            last = self._progress.get(communicator)
            if last is not None and last[0] == number:
                self._progress[communicator] = (number, last[1], True, last[3])

    def waits(self, communicator: str, peer: int | None) -> None:
        """Notes that this rank waits for a message from, or to, rank `peer` of the world, or that it does no more."""
        if peer is None:
            self._waits.pop(communicator, None)
        else:
            self._waits[communicator] = peer

    def waited_for(self, communicator: str, rank: int) -> int | None:
        """Returns the rank whose message another rank waits for, as it said in its last heartbeat."""
        seen = self._board.seen.get(rank)
        return None if seen is None else seen.heartbeat.waits.get(communicator)

    def follow(self, mover: Mover) -> None:
        """Counts in the heartbeats from now on what something moves, as long as it exists."""
        with self._noting:
            self._movers[mover] = 0

    def moved(self) -> int:
        """Returns the bytes of operations that have left or arrived so far at this rank."""
        with self._noting:
            for mover, before in list(self._movers.items()):
                # One that has ended may return 0.
                if (now := mover.moved()) > before:
                    self._moved += now - before
                    self._movers[mover] = now
            return self._moved

    def stirs(self, communicator: str, ranks: Iterable[int]) -> dict[int, Stir]:
        """Returns what some ranks move, and those that these wait for, and so on; by the fields that were last read.

        Args:
            communicator: of the operation for which they are waited.
            ranks: as numbers of the world.
        """
        found, follow = dict[int, Stir](), list(ranks)
        while follow:
            rank = follow.pop()
            seen = self._board.seen.get(rank)
            if rank in found or rank == self.rank or seen is None:
                continue
            told, times = seen.heartbeat, seen.times
            number = told.doing.get(communicator, NOTHING)[0]
            at = max(times.get(name, float("-inf")) for name in ("moved", Heartbeat.field_of(communicator)))
            found[rank] = Stir((number, told.moved), told.begun - number, at)
            follow.extend(told.waits.values())
        return found

    def closed(self, communicator: str) -> None:
        """Records that this rank no longer uses a communicator; the next heartbeat sends it to the others."""
        number = self._progress.get(communicator, NOTHING)[0]
        self._progress[communicator] = (number, "closed", True, "")
        self._closed.append(communicator)
        if len(self._closed) > _CLOSED_KEPT:
            self._progress.pop(self._closed.pop(0), None)
        self._wake.set()

    def gave_up(self, communicator: str, reason: str) -> None:
        """Records that this rank stops using a communicator whose connections stay; the next heartbeat sends it."""
        text = f"rank {self.rank} gave up: {reason}"
        self._outgoing.append(Diagnosis("closed", (self.rank,), text, communicator, self.rank))
        self._wake.set()

    def observe(self) -> None:
        """Watches for the next heartbeats which ranks beat or leave, so that a diagnosis is quick if one is needed."""
        self._observe_until = self.clock() + 4 * self.heartbeat

    def inquire(self, age: float = 0.0) -> float:
        """Has the next heartbeat read what all ranks do, unless that was done less than `age` seconds before.

        Returns:
            When it was last read, by `clock`.
        """
        self.observe()
        read_at = self._board.read_at
        self._read_by = min(self._read_by, read_at + age)
        return read_at

    def reported(self, communicator: str, members: Sequence[int]) -> Diagnosis | None:
        """Returns the first report that concerns a communicator; asks only this process's memory."""
        return next((report for report in list(self._board.reports) if report.concerns(communicator, members)), None)

    def missed(self, communicator: str, members: Sequence[int]) -> bool:
        """Returns True if a rank has left the job without closing a communicator, and nothing of it is on its way."""
        now = self.clock()
        return any(
            seen.heartbeat.left
            and (communicator not in seen.heartbeat.doing or seen.heartbeat.doing[communicator][1] != "closed")
            and now - seen.changed > _GRACE * self.heartbeat
            for seen in (self._board.seen.get(rank) for rank in members)
            if seen is not None
        )

    def diagnose(self, case: FailedOperation, *, leaving: bool = False) -> Diagnosis:
        """Finds out why an operation failed; takes up to about seven heartbeats, never more than fourteen.

        Args:
            case: the operation, which has failed just now.
            leaving: True if this rank waits for nothing but the farewell of the others, who need not be late for that.

        Returns:
            The diagnosis, which has been reported to the other ranks unless it is "unknown", or "late" for a farewell.
        """
        while True:
            self.inquire()
            diagnosis = self.diagnosis(case)
            if diagnosis is not None:
                break
            self._wake.set()
            with self._changed:
                self._changed.wait(self.heartbeat / 2)
        if diagnosis.kind == "unknown" or (leaving and diagnosis.kind == "late") or diagnosis in self._board.reports:
            return diagnosis
        return self.report(diagnosis, case.members)

    def report(self, diagnosis: Diagnosis, members: Sequence[int]) -> Diagnosis:
        """Reports a diagnosis to the other ranks; returns an earlier report, if there is one.

        Args:
            diagnosis: on a failure.
            members: of its communicator, as numbers of the world.
        """
        if self._store_trouble(self.clock()) is not None:
            return diagnosis
        self._outgoing.append(diagnosis)
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: diagnosis not in self._outgoing, timeout=_LINGER * self.heartbeat)
        return self.reported(diagnosis.communicator, members) or diagnosis

    def call(self, communicator: str) -> str:
        """Returns in which method this rank began its last operation of a communicator; empty if that is not known."""
        return self._progress.get(communicator, NOTHING)[3]

    def calls(self, communicator: str, number: int, ranks: Sequence[int]) -> dict[int, str]:
        """Returns in which methods ranks start operations of a communicator, as far as two heartbeats show it.

        Args:
            communicator: that is used.
            number: of an operation that all of the ranks have started.
            ranks: as numbers of the world.
        """
        end = self.clock() + 2 * self.heartbeat

        def told(rank: int) -> str:
            if rank == self.rank:
                return self.call(communicator)
            seen = self._board.seen.get(rank)
            doing = NOTHING if seen is None else seen.heartbeat.doing.get(communicator, NOTHING)
            return doing[3] if doing[0] >= number else ""

        while not all(told(rank) for rank in ranks) and told(self.rank) and self.clock() < end:
            self.inquire()
            self._wake.set()
            with self._changed:
                self._changed.wait(self.heartbeat / 2)
        return {rank: told(rank) for rank in ranks}

    def diagnosis(self, case: FailedOperation) -> Diagnosis | None:
        """Returns the diagnosis of an operation that failed, or None while the heartbeats do not suffice."""
        view = View(
            rank=self.rank,
            period=self.heartbeat,
            now=self.clock(),
            read_at=self._board.read_at,
            seen=dict(self._board.seen),
            ended=tuple(self._ended),
            reports=list(self._board.reports),
            trouble=self._store_trouble(case.since),
            state=self._board.evidence.state,
            pid=self._board.evidence.pid,
        )
        return diagnose(case, view)

    def stop(self, reason: str) -> None:
        """Sends a last message to the other ranks and ends the background thread; takes at most some seconds."""
        if self._left:
            return
        self._left = reason
        if self._thread is None:
            self.beat()
            return
        atexit.unregister(self._stop_at_exit)
        self._wake.set()
        stays = _LAST_WORD if self.rank == HOST else 0.0
        self._thread.join(max(stays, _LINGER * self.heartbeat) + 2 * self.heartbeat)
        if self._thread.is_alive():
            _log.debug("the liveness store did not answer while rank %d left", self.rank)
        if self.release is not None:
            self.release()
            # Without its connection no call can last: no thread is to be under way when the interpreter ends.
            self._thread.join(self.heartbeat)

    def beat(self) -> None:
        """One round with the store: own heartbeat and report, others' reports and, while observing, their heartbeats.

        Raises:
            RuntimeError: if the store cannot be reached.
            OSError: likewise.
        """
        self._beats += 1
        now = self._in_call_since = self.clock()
        left = self._left
        doing, waits = dict(self._progress), dict(self._waits)
        heartbeat = Heartbeat(left, doing, waits, self._process, self.begun, self.moved())
        observing, inquiring = now < self._observe_until, now >= self._read_by
        # Processes before heartbeats: what a process wrote before its end is read after that is noticed.
        ended = [rank for rank in self._board.near if observing and self._board.evidence.state(rank) == "gone"]
        unexplained = [rank for rank in ended if not self._explained(rank)]
        depth = SIGNS if observing or not self._board.complete else NO_HEARTBEATS
        if observing and (inquiring or unexplained):
            depth, self._read_by = FIELDS, float("inf")
        self._board.exchange(heartbeat, depth)
        self._said_goodbye = bool(left)
        self._witness(unexplained)
        while self._outgoing:
            self._board.report(self._outgoing[0])
            del self._outgoing[0]
        self._in_call_since = None
        with self._changed:
            self._changed.notify_all()

    def _explained(self, rank: int) -> bool:
        """Returns True if a rank has left with a farewell, or was reported as lost."""
        known = any(report.kind == "lost" and rank in report.ranks for report in self._board.reports)
        return known or bool(self._board.seen[rank].heartbeat.left)

    def _witness(self, ended: list[int]) -> None:
        """Reports ranks whose processes have ended without a farewell: their connections may not show it."""
        now = self.clock()
        for rank in ended:
            doing = self._board.seen[rank].heartbeat.doing
            if self._explained(rank):
                continue
            since = self._ended.setdefault(rank, now)
            if now - since < _GRACE / 2 * self.heartbeat:
                continue
            under_way = [f"{describe(one)} of communicator {name!r}" for name, one in doing.items() if not one[2]]
            text = ended_text(rank, self._board.evidence.pid(rank), ", ".join(under_way) or "in no operation")
            self._outgoing.append(Diagnosis("lost", (rank,), text, "", self.rank))

    def _store_trouble(self, since: float) -> Trouble | None:
        """Returns what is wrong with the store; `since` is when the operation failed."""
        started, now = self._in_call_since, self.clock()
        if self._trouble is not None or started is None:
            return self._trouble
        # Up to a heartbeat after the failure, a pause of this process's own interpreter may be why a call is not back.
        blocked = now - started > SILENT * self.heartbeat and now - since > self.heartbeat
        return Trouble(f"no answer for {now - started:.1f} s", unanswered=True, since=started) if blocked else None

    def _run(self) -> None:
        try:
            while not self._left:
                # Until it knows who the others are, it asks more often.
                self._wake.wait(self.heartbeat if self._board.complete else self.heartbeat / 5)
                self._wake.clear()
                try:
                    self.beat()
                except (RuntimeError, OSError) as error:
                    if not self._recover(error):
                        return
            # It may have been in the middle of a beat when the farewell was given.
            if not self._said_goodbye:
                self.beat()
            self._leave()
        except (RuntimeError, OSError) as error:
            # The host has gone, or the network to it: what is known by now is what a diagnosis rests on.
            self._end(Trouble(_line(error)))
        except Exception as error:
            _log.exception("the heartbeats of rank %d have ended", self.rank)
            self._end(Trouble(_line(error), own=True))

    def _recover(self, error: Exception) -> bool:
        """Connects to the store again, as often as it takes; returns False if that makes no sense or this rank leaves."""
        since = self.clock() if self._in_call_since is None else self._in_call_since
        pause, told = self.heartbeat, False
        self._end(Trouble(_line(error), since=since, retrying=self._reconnect is not None))
        while self._reconnect is not None and not self._left:
            # It lives as long as rank 0, whose end other evidence shows.
            if self.rank != HOST and self._board.evidence.state(HOST) == "gone":
                self._end(Trouble(_line(error), since=since))
                return False
            if not told and self.clock() - since > _QUIET:
                told = True
                _log.warning(
                    "rank %d has lost its connection to the heartbeat store, and tries to connect again: %s",
                    self.rank,
                    error,
                )
            try:
                self._reconnect()
                self.beat()
            except (RuntimeError, OSError) as again:
                self._end(Trouble(_line(again), since=since, retrying=True))
                self._wake.wait(pause)
                self._wake.clear()
                pause = min(2 * pause, max(_LONGEST_PAUSE, self.heartbeat))
                continue
            self._trouble = None
            with self._changed:
                self._changed.notify_all()
            _log.warning(
                "rank %d had no connection to the heartbeat store for %.1f s (%s), and has one again",
                self.rank,
                self.clock() - since,
                _line(error),
            )
            return True
        return False

    def _end(self, trouble: Trouble) -> None:
        self._trouble = trouble
        with self._changed:
            self._changed.notify_all()

    def _leave(self) -> None:
        left = self._board.count_left(1)
        began, moment = self.clock(), _LINGER * self.heartbeat
        while self.rank == HOST and self.clock() < began + max(_LAST_WORD, moment):
            lost = {rank for report in self._board.reports if report.kind == "lost" for rank in report.ranks}
            # One that was named because it left has been counted.
            counted = {rank for rank, seen in self._board.seen.items() if seen.heartbeat.left}
            if (now := self.clock()) < began + moment:
                # One that was named and goes on reads within a moment why.
                counted |= {rank for rank, seen in self._board.seen.items() if now - seen.changed < moment}
            if left >= self.size - len((lost | self.blamed) - counted - {self.rank}):
                break
            time.sleep(self.heartbeat / 20)
            self._board.exchange(None, SIGNS)
            left = self._board.count_left(0)

    def forget(self) -> None:
        """For a forked child, which has no thread, and whose end is not the rank's."""
        self._left = self._left or FORKED
        atexit.unregister(self._stop_at_exit)
        # A thread may have held it that the child lacks.
        self._noting = threading.Lock()

    def _stop_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        after = f" after {type(error).__name__}: {error}" if error is not None else ""
        self.stop(f"its process exited{after}")


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
