"""What the ranks have written into the store of heartbeats, as far as this rank has read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bagua_kernels.comm.failures.diagnose import Seen
from bagua_kernels.comm.failures.failure import Diagnosis
from bagua_kernels.comm.failures.heartbeat import Heartbeat, parse_report, report_to_json
from bagua_kernels.comm.failures.records import FIELDS, NOTHING
from bagua_kernels.comm.joining.evidence import Evidence

_log = logging.getLogger(__name__)
_UNSURE = object()  # in place of a value that the store may have or not


class Store(Protocol):
    """The methods of `Records`, at whatever place these are; without a connection, calls raise RuntimeError or OSError."""

    def beat(  # noqa: D102
        self, rank: int, changed: dict[str, Any] | None, seen: int, read: int, report: int, depth: int, /
    ) -> tuple[int, str, dict[str, dict[str, tuple[Any, float]]], list[str]]: ...
    def add(self, key: str, value: int, /) -> int: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> str: ...  # noqa: D102


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
        read_at: when all fields of the heartbeats were last read.
        reports: what ranks have reported, in order.
        evidence: the processes of the ranks on this rank's host.
        near: the ranks on this rank's host.
    """

    def __init__(self, store: Store, rank: int, size: int, period: float, clock: Callable[[], float]) -> None:
        self.seen: dict[int, Seen] = {}
        self.read_at = self._seen_at = float("-inf")
        self.reports: list[Diagnosis] = []
        self.evidence = Evidence()
        self.near: set[int] = set()
        self._next_report = 0
        self._store = store
        self._rank = rank
        self._size = size
        self._period = period
        self._clock = clock
        self._written: dict[str, Any] = {}
        self._fields: dict[int, dict[str, tuple[Any, float]]] = {}
        self._seen_version = self._read_version = -1

    @property
    def complete(self) -> bool:
        """Returns True if every other rank has been seen to beat."""
        return len(self.seen) == self._size - 1

    def exchange(self, heartbeat: Heartbeat | None, depth: int) -> None:
        """Writes this rank's heartbeat, if one is given, and reads new reports and the heartbeats of the others.

        Args:
            heartbeat: this rank's.
            depth: see `Records.beat`.
        """
        fields = None if heartbeat is None else heartbeat.to_fields()
        changed = None if fields is None else _difference(self._written, fields)
        # Without an answer, nobody knows what the store has got: then all of it is written again.
        before, self._written = self._written, dict.fromkeys(self._written | (changed or {}), _UNSURE)
        version, silent, found, reports = self._store.beat(
            self._rank, changed, self._seen_version, self._read_version, self._next_report, depth
        )
        self._written = before if fields is None else fields
        if depth == NOTHING:
            seen, read_at = self.seen, self.read_at
        else:
            now = self._clock()
            seen = self._look(int(silent, 16), found, now)
            read_at = now if depth == FIELDS else self.read_at
            self._seen_version = version
            if depth == FIELDS:
                self._read_version = version
        for text in reports:
            self._take_report(text)
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

    def _take_report(self, text: str) -> None:
        self._next_report += 1
        try:
            self.reports.append(parse_report(text, self._size))
        except (ValueError, RecursionError) as error:
            _log.warning("rank %d passes over a report that cannot be read: %s", self._rank, error)

    def _look(self, silent: int, found: Mapping[str, Mapping[str, Sequence[Any]]], now: float) -> dict[int, Seen]:
        """Returns the last heartbeat of each other rank; takes in the fields that have changed."""
        new = {int(rank): fields for rank, fields in found.items()}
        for rank, fields in new.items():
            kept = self._fields.setdefault(rank, {})
            kept.update({name: (value, now - age) for name, (value, age) in fields.items()})
        # A gap in the observation, such as a pause of this interpreter, says nothing about the others: they start anew.
        seen, gap = dict(self.seen), now - self._seen_at > 2.5 * self._period
        self._seen_at = now
        for rank in range(self._size):
            last, beaten = seen.get(rank), not silent >> rank & 1
            if beaten and last is not None and not gap and rank not in new and rank != self._rank:
                seen[rank] = Seen(last.heartbeat, now, True, last.times)
                continue
            if rank == self._rank or (last is None and not beaten) or not (beaten or gap or rank in new):
                continue
            fields = self._fields.get(rank, {})
            heartbeat = Heartbeat.parse({}) if last is None else last.heartbeat
            if rank in new or last is None:
                try:
                    heartbeat = Heartbeat.parse(
                        {name: value for name, (value, _) in fields.items() if value is not None}
                    )
                except (ValueError, TypeError, RecursionError) as error:
                    # What it writes next will be read again; until then it gave none.
                    _log.debug(
                        "rank %d passes over a heartbeat of rank %d that cannot be read: %s", self._rank, rank, error
                    )
                    continue
                if "process" in fields:
                    self.evidence.add(rank, heartbeat.process)
                    self.near.add(rank)
            times = {name: at for name, (_, at) in fields.items()} if rank in new or last is None else last.times
            if beaten or gap or last is None:
                seen[rank] = Seen(heartbeat, now, last is not None and not gap, times)
            else:
                seen[rank] = Seen(heartbeat, last.changed, last.moved, times)
        return seen


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that differ, with None for those that have ended."""
    ended = dict.fromkeys(name for name in before if name not in after)
    return ended | {name: value for name, value in after.items() if name not in before or before[name] != value}
