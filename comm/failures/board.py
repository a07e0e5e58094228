"""What the ranks have written into the store of heartbeats, as far as this rank has read it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from bagua_kernels.comm.failures.diagnose import Seen
from bagua_kernels.comm.failures.failure import Diagnosis
from bagua_kernels.comm.failures.heartbeat import Heartbeat, parse_report, report_to_json
from bagua_kernels.comm.joining.evidence import Evidence

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of a `torch.distributed.Store`; where it cannot be reached, calls raise RuntimeError or OSError."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, value: int, /) -> int: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102


class Board:
    """The heartbeats and the reports of all ranks.

    Args:
        store: where they are.
        rank: this rank.
        size: the number of ranks.
        period: seconds between two heartbeats.
        clock: seconds of a clock that never goes back.

    Attributes:
        seen: the last heartbeat of each other rank.
        read_at: when the heartbeats were last read.
        reports: what ranks have reported, in order.
        evidence: the processes of the ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, period: float, clock: Callable[[], float]) -> None:
        self.seen: dict[int, Seen] = {}
        self.read_at = float("-inf")
        self.reports: list[Diagnosis] = []
        self.evidence = Evidence()
        self._next_report = 0
        self._store = store
        self._rank = rank
        self._size = size
        self._period = period
        self._clock = clock

    @property
    def complete(self) -> bool:
        """Returns True if a heartbeat of every other rank has been read."""
        return len(self.seen) == self._size - 1

    def write(self, heartbeat: Heartbeat) -> None:
        """Writes this rank's heartbeat."""
        self._store.set(f"beat/{self._rank}", heartbeat.to_json())

    def read(self, *, heartbeats: bool) -> None:
        """Reads new reports, and before them the heartbeats if that is wanted."""
        # What a rank reported before it left is read after that is noticed.
        seen, read_at = self._read_heartbeats() if heartbeats else (self.seen, self.read_at)
        self._read_reports()
        # Nobody may judge by the heartbeats before the reports have been read, too.
        self.seen, self.read_at = seen, read_at

    def count_left(self, more: int) -> int:
        """Adds to the number of ranks that have left, and returns it."""
        return self._store.add("left", more)

    def report(self, diagnosis: Diagnosis) -> None:
        """Writes a report into the first free place, unless one before it explains the same failure."""
        text = report_to_json(diagnosis)
        while not any(report.concerns(diagnosis.communicator, diagnosis.ranks) for report in self.reports):
            self._take_report(self._store.compare_set(f"report/{self._next_report}", "", text))

    def _take_report(self, text: bytes) -> None:
        self._next_report += 1
        try:
            self.reports.append(parse_report(text, self._size))
        except (ValueError, RecursionError) as error:
            _log.warning("rank %d passes over a report that cannot be read: %s", self._rank, error)

    def _read_reports(self) -> None:
        while self._store.check([f"report/{self._next_report}"]):
            self._take_report(self._store.get(f"report/{self._next_report}"))

    def _read_heartbeats(self) -> tuple[dict[int, Seen], float]:
        """Returns the last heartbeat of each other rank, and when they were read."""
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        keys = [f"beat/{rank}" for rank in ranks]
        # Every rank writes its first heartbeat before any rank communicates, but this may be earlier.
        if len(self.seen) < len(ranks) and not self._store.check(keys):
            return self.seen, self.read_at
        values = self._store.multi_get(keys)
        seen, now = dict(self.seen), self._clock()
        # A gap in the observation, such as a pause of this interpreter, says nothing about the others: they start anew.
        gap = now - self.read_at > 2.5 * self._period
        for rank, value in zip(ranks, values, strict=True):
            last = seen.get(rank)
            try:
                heartbeat = Heartbeat.parse(value)
            except (ValueError, RecursionError) as error:
                # The rank's next one will be read again; until then it gave none.
                _log.debug(
                    "rank %d passes over a heartbeat of rank %d that cannot be read: %s", self._rank, rank, error
                )
                continue
            self.evidence.add(rank, heartbeat.process)
            if last is None or gap or last.heartbeat.beat != heartbeat.beat:
                seen[rank] = Seen(heartbeat, now, last is not None and not gap)
        return seen, now
