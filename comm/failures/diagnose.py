"""Finds out from the heartbeats who is at fault when an operation has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bagua_kernels.comm.failures.failure import Diagnosis, Kind
from bagua_kernels.comm.failures.heartbeat import NOTHING, Doing, Heartbeat, describe
from bagua_kernels.comm.joining.evidence import State

HOST = 0  # the rank whose process holds the store
SILENT = 6.0  # periods without a heartbeat after which a rank counts as lost


@dataclass(frozen=True)
class FailedOperation:
    """An operation that failed.

    Attributes:
        communicator: its name.
        members: its ranks, as numbers of the world.
        number: which operation of it failed; None for one that has no number (send and receive).
        operation: its name.
        since: when it failed.
        timed_out: that nothing else than the time speaks against the other ranks: no connection broke.
        beyond: ranks that take no part, but may be what a member waits for.
        broken: ranks to which a connection broke, where the transport knows them.
        still: when something of it last moved, if the time ran out; None if that is not known.
        heard: when something last came from ranks, other than heartbeats, where the transport knows it.
        call: the method of this rank's user that began it; may be empty.
    """

    communicator: str
    members: Sequence[int]
    number: int | None
    operation: str
    since: float
    timed_out: bool
    beyond: Sequence[int] = ()
    broken: Sequence[int] = ()
    still: float | None = None
    heard: Mapping[int, float] = field(default_factory=dict)
    call: str = ""


@dataclass
class Seen:
    """The last heartbeat of a rank.

    Attributes:
        heartbeat: what the rank wrote; empty where its fields have not been read.
        changed: when it was first seen, by this rank's clock.
        moved: True if it was seen to follow another one, so that the rank was certainly alive just before `changed`.
        times: when each field last changed, by this rank's clock.
    """

    heartbeat: Heartbeat
    changed: float
    moved: bool
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trouble:
    """What keeps this rank from reading heartbeats.

    Attributes:
        text: what it is.
        unanswered: True if the store has not answered for long, False if the connection to it broke.
        own: True if the fault lies in this process.
        since: when it began; None if that is not known.
        retrying: True while this rank tries to connect again.
    """

    text: str
    unanswered: bool = False
    own: bool = False
    since: float | None = None
    retrying: bool = False


@dataclass(frozen=True)
class View:
    """What one rank knows of the others.

    Attributes:
        rank: that rank.
        period: seconds between two heartbeats.
        now: the time.
        read_at: when all fields of the heartbeats were last read.
        seen: the last heartbeat of each other rank.
        ended: ranks whose processes have ended, and of which everything that they wrote has been read.
        reports: what ranks have reported, in order.
        trouble: what keeps this rank from reading heartbeats; None if nothing does.
        state: returns what the operating system knows of a rank's process.
        pid: returns the number of a rank's process.
    """

    rank: int
    period: float
    now: float
    read_at: float
    seen: Mapping[int, Seen]
    ended: Iterable[int]
    reports: Sequence[Diagnosis]
    trouble: Trouble | None
    state: Callable[[int], State]
    pid: Callable[[int], int]


def ended_text(rank: int, pid: int, doing: str) -> str:
    """Returns the text about the end of a rank's process; `doing` is empty if its operations were not read."""
    told = f"; at its last heartbeat it was {doing}" * bool(doing)
    return f"the process of rank {rank} (pid {pid}) has ended without a farewell{told}"


def diagnose(case: FailedOperation, view: View) -> Diagnosis | None:
    """Returns the diagnosis of an operation, or None while the heartbeats do not suffice."""
    return _Reasoning(case, view).diagnosis()


class _Reasoning:
    def __init__(self, case: FailedOperation, view: View) -> None:
        self._case = case
        self._view = view
        self._others = [rank for rank in case.members if rank != view.rank]
        self._over = view.now - case.since >= 2 * SILENT * view.period

    def diagnosis(self) -> Diagnosis | None:
        case, view = self._case, self._view
        for report in view.reports:
            if report.concerns(case.communicator, [*case.members, *case.beyond]):
                return report
        if view.trouble is not None:
            return self._without_store(view.trouble)
        if view.read_at < case.since or any(rank not in view.seen for rank in self._others):
            return self._undecided()
        gone = self._gone(self._others) or self._gone([rank for rank in case.beyond if rank in view.seen])
        if gone:
            return self._cause(gone) or self._told("lost", gone)
        closed = [rank for rank in self._others if (self._doing(rank) or NOTHING)[1] == "closed"]
        if closed:
            return self._told("closed", {rank: f"rank {rank} has closed this communicator" for rank in closed})
        # A rank for which another waits in vain may itself be waiting for a third one that is gone.
        for watched in (self._others, [r for r in case.beyond if case.timed_out and r in view.seen]):
            silent = [rank for rank in watched if self._silence(rank) > SILENT * view.period and not self._mute(rank)]
            if silent:
                return self._cause(silent) or self._blame(silent)
        if not all(self._proven(rank) for rank in self._others):
            return self._undecided()
        if case.number is None and len(self._others) == 1:
            return self._end_of_chain()
        if case.number is None:
            return self._unknown("every rank still answers; which of several peers is missing is not known")
        called = {rank: self._other_call(rank) for rank in self._others}
        if any(called.values()):
            told = {rank: call for rank, call in called.items() if call}
            of = {view.rank: case.call, **{rank: (self._doing(rank) or NOTHING)[3] for rank in told}}
            told = {view.rank: f"rank {view.rank} called {case.operation}", **told}
            return self._told(
                "mismatch", {rank: f"{text}{f' in {of[rank]}' * bool(of[rank])}" for rank, text in told.items()}
            )
        late = {
            rank: f"rank {rank} answers but is not in it: it is {describe(self._doing(rank))}{self._elsewhere(rank)}"
            for rank in self._others
            if self._is_late(rank, case.number)
        }
        if pair := self._at_a_stand(late):
            a, b = pair
            text = f"nothing came through the connection between ranks {a} and {b}, which wait for one another: rank {a} is "
            text += describe(self._doing(a))
            return Diagnosis("stalled", pair, text, case.communicator, view.rank)
        return self._told("late", late) if late else self._unknown("every rank still answers and has entered it")

    def _without_store(self, trouble: Trouble) -> Diagnosis | None:
        case, view = self._case, self._view
        if trouble.own:
            return self._unknown(f"the heartbeats of this rank have ended: {trouble.text}")
        concerned = [*self._others, *case.beyond]
        told = f"rank {HOST} holds the liveness store, which cannot be reached: {trouble.text}"
        if HOST in concerned and view.state(HOST) == "gone":
            return self._told("lost", {HOST: told})
        # The way to the store may be back in a moment. That it broke is no evidence, unless the operation failed with it.
        if trouble.retrying and not self._over:
            return None
        # The others may have ended because of that, and what they reported cannot be read.
        seems_gone = view.state(HOST) == "unknown" and not trouble.unanswered and self._at_once(trouble)
        if HOST in concerned and seems_gone:
            return self._told("lost", {HOST: told})
        ended = [rank for rank in concerned if view.state(rank) == "gone"]
        if ended:
            return self._told("lost", {rank: self._end(rank) for rank in ended})
        stopped = [rank for rank in concerned if case.timed_out and view.state(rank) == "stopped"]
        if stopped:
            return self._told("lost", {rank: f"the process of rank {rank} is stopped" for rank in stopped})
        if HOST not in self._others and not (case.timed_out and HOST in case.beyond):
            return self._unknown(f"the liveness store on rank {HOST} cannot be reached: {trouble.text}")
        # An interpreter that pauses for a moment is no reason for a connection to break.
        if trouble.unanswered and not case.timed_out and view.state(HOST) != "unknown" and not self._over:
            return None
        if self._at_once(trouble) or HOST in case.broken:
            return self._told("lost", {HOST: told})
        return self._unknown(f"the liveness store on rank {HOST} cannot be reached: {trouble.text}")

    def _at_once(self, trouble: Trouble) -> bool:
        """Returns True if the store went out of reach when the operation came to a stand."""
        moment = self._case.since if self._case.still is None else self._case.still
        return trouble.since is None or abs(moment - trouble.since) <= SILENT * self._view.period

    def _mute(self, rank: int) -> bool:
        """Returns True if a rank went on sending after its last heartbeat: it is the way to the store that broke."""
        return self._case.heard.get(rank, float("-inf")) - self._view.seen[rank].changed > SILENT * self._view.period

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        left = {rank: self._view.seen[rank].heartbeat.left for rank in ranks}
        found = {rank: f"rank {rank} left: {reason}" for rank, reason in left.items() if reason}
        return found or {rank: self._end(rank) for rank in left if rank in self._view.ended}

    def _blame(self, silent: list[int]) -> Diagnosis | None:
        """Chooses among ranks that have fallen silent: a busy interpreter falls silent too, for a while."""
        case, state = self._case, self._view.state
        if case.timed_out:
            blamed = [rank for rank in silent if state(rank) == "stopped"]
            longest = max(self._silence(rank) for rank in silent)
            blamed = blamed or [rank for rank in silent if self._silence(rank) > longest / 2]
        else:
            # A process that is there keeps its connections, so it broke none.
            blamed = [rank for rank in silent if state(rank) == "unknown"]
            blamed = [rank for rank in blamed if rank in case.broken] or blamed
            certain = all(self._proven(rank) for rank in self._others if rank not in silent)
            if not self._over and (len(blamed) != 1 or not certain):
                return None
            blamed = blamed or silent
        return self._told("lost", {rank: self._quiet(rank) for rank in blamed})

    def _quiet(self, rank: int) -> str:
        state = self._view.state(rank)
        pid = self._view.pid(rank)
        process = {"stopped": f" (its process {pid} is stopped)", "there": f" (its process {pid} is there)"}.get(
            state, ""
        )
        text = f"rank {rank} sent no heartbeat for {self._silence(rank):.1f} s{process}; at the last one it was "
        return text + describe(self._doing(rank))

    def _end(self, rank: int) -> str:
        # Without the store, operations may have been read long before the rank's last heartbeat.
        read = self._view.read_at >= self._case.since
        return ended_text(rank, self._view.pid(rank), describe(self._doing(rank)) if read else "")

    def _silence(self, rank: int) -> float:
        return self._view.now - self._view.seen[rank].changed

    def _proven(self, rank: int) -> bool:
        """Returns True if a rank was alive when the operation failed, or after it if a connection broke."""
        case, seen = self._case, self._view.seen[rank]
        # Where a connection broke, only a beat made after that proves life; readings are up to a beat apart.
        proof = case.since + (-2 if case.timed_out else 1.5) * self._view.period
        return seen.moved and seen.changed > proof

    def _is_late(self, rank: int, number: int) -> bool:
        doing = self._doing(rank)
        return doing is None or doing[0] < number

    def _at_a_stand(self, late: Iterable[int]) -> tuple[int, int] | None:
        """Returns two of the late ranks that wait for one another; None if no two do."""
        waits = {rank: self._view.seen[rank].heartbeat.waits.get(self._case.communicator) for rank in late}
        return next(((a, b) for a, b in waits.items() if b is not None and a < b and waits.get(b) == a), None)

    def _other_call(self, rank: int) -> str:
        """Returns what a rank called instead of this operation; empty if it has not called anything else."""
        doing = self._doing(rank)
        if doing is None or doing[0] != self._case.number or doing[1] == self._case.operation:
            return ""
        return f"rank {rank} called {doing[1]}"

    def _doing(self, rank: int) -> Doing | None:
        seen = self._view.seen.get(rank)
        return None if seen is None else seen.heartbeat.doing.get(self._case.communicator)

    def _elsewhere(self, rank: int) -> str:
        """Returns in which operations of other communicators a rank is, where it is known what for; to go behind a sentence."""
        doing = self._view.seen[rank].heartbeat.doing
        others = sorted({one[3]: one for name, one in doing.items() if name != self._case.communicator}.values())
        told = [describe(one) for one in others if one[3] and not one[2]]
        return f", and {' and '.join(told)}" if told else ""

    def _cause(self, gone: Iterable[int]) -> Diagnosis | None:
        """Returns what ranks that are gone had reported before: who goes because others were lost is not to blame."""
        return next((report for report in self._view.reports if report.kind == "lost" and report.by in gone), None)

    def _end_of_chain(self) -> Diagnosis:
        """Names the rank for which, from one to the next, all wait whose messages do not come."""
        culprit, passed = self._others[0], [self._view.rank]
        while culprit not in passed and culprit in self._view.seen:
            following = self._view.seen[culprit].heartbeat.waits.get(self._case.communicator)
            if following is None:
                told = f"rank {culprit} answers, but has not sent or received what others wait for"
                return self._told("late", {culprit: told})
            passed.append(culprit)
            culprit = following
        chain = " for ".join(f"{rank}" for rank in [*passed, culprit])
        return self._unknown(f"every rank still answers, and they wait for one another (rank {chain})")

    def _undecided(self) -> Diagnosis | None:
        return self._unknown("the heartbeats do not show which rank failed") if self._over else None

    def _unknown(self, text: str) -> Diagnosis:
        return Diagnosis("unknown", (), text, self._case.communicator, self._view.rank)

    def _told(self, kind: Kind, found: Mapping[int, str]) -> Diagnosis:
        return Diagnosis(kind, tuple(found), "; ".join(found.values()), self._case.communicator, self._view.rank)
