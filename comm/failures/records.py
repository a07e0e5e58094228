"""What the ranks have written into the store of heartbeats; needs nothing but Python's library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# What a rank reads beside the reports: nothing; which ranks have beaten; the fields of all heartbeats, too.
NOTHING, SIGNS, FIELDS = 0, 1, 2


class Records:
    """Heartbeats in fields, each with the version at which it last changed, and texts by key.

    A reader gives the version of its last reading and gets what has changed since. An answer to ranks at rest is a few
    bytes. Every beat is a version. Any thread may call the methods.

    Args:
        size: the number of ranks.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._version = 0
        self._beats: dict[int, int] = {}
        # For each rank and field: the value, its version, and when it came. A value of None is a field that has ended.
        self._fields: dict[int, dict[str, tuple[Any, int, float]]] = {}
        self._notable: list[tuple[int, int]] = []  # versions at which ranks wrote their process or a farewell
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def beat(
        self, rank: int, changed: dict[str, Any] | None, seen: int, read: int, report: int, depth: int
    ) -> tuple[int, str, dict[str, dict[str, tuple[Any, float]]], list[str]]:
        """Writes a rank's heartbeat and reads those of the others.

        Args:
            rank: that writes.
            changed: fields of its heartbeat that differ from the last one, None for a field that has ended; None if the
                rank only reads.
            seen: the version at the rank's last reading of any depth, -1 before the first.
            read: the version at its last reading of all fields, -1 before the first.
            report: the number of the first report that it has not read.
            depth: what it reads: `NOTHING`, `SIGNS` or `FIELDS`.

        Returns:
            The version of this reading. A number in hexadecimal whose bits are the ranks that have not beaten since `seen`.
            For each rank, in decimal, the fields that have changed since `read`, with the seconds since they came. With
            `SIGNS` these are only those of ranks that have left. The processes are only those on this rank's host, for no other
            rank can look them up. The reports.

        Raises:
            ValueError: for arguments that no rank gives.
        """
        if not 0 <= rank < self._size or not all(type(number) is int for number in (seen, read, report, depth)):
            raise ValueError(
                f"expected a rank below {self._size} and numbers, got {rank!r}, {seen!r}, {read!r}, {report!r}"
            )
        with self._lock:
            if changed is not None:
                self._write(rank, changed)
            silent, found = 0, {}
            if depth != NOTHING:
                silent = sum(1 << other for other in range(self._size) if self._beats.get(other, -1) <= seen)
                found = self._notable_since(rank, seen, read)
                if depth == FIELDS:
                    found |= {f"{other}": new for other in self._fields if (new := self._changed(rank, other, read))}
            reports = list[str]()
            while (text := self._texts.get(f"report/{report + len(reports)}")) is not None:
                reports.append(text)
            return self._version, f"{silent:x}", found, reports

    def add(self, key: str, value: int) -> int:
        """Adds to a number, at first 0, and returns the sum."""
        with self._lock:
            total = int(self._texts.get(_text(key), "0")) + int(value)
            self._texts[key] = str(total)
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a text that is as expected; an empty one expects none. Returns the text that is there then."""
        with self._lock:
            if self._texts.get(_text(key), "") == expected:
                self._texts[key] = _text(desired)
            return self._texts.get(key, expected)

    def _write(self, rank: int, changed: dict[str, Any]) -> None:
        self._version += 1
        self._beats[rank] = self._version
        now, fields = self._clock(), self._fields.setdefault(rank, {})
        for name, value in changed.items():
            fields[_text(name)] = value, self._version, now
        if "process" in changed or "left" in changed:
            self._notable.append((self._version, rank))

    def _notable_since(self, reader: int, seen: int, read: int) -> dict[str, dict[str, tuple[Any, float]]]:
        found = {}
        for version, rank in reversed(self._notable):
            if version <= seen:
                break
            if self._value(rank, "left"):
                found[f"{rank}"] = self._changed(reader, rank, read)
            elif self._host(rank) == self._host(reader):
                found[f"{rank}"] = self._changed(reader, rank, read, "process")
        return found

    def _changed(self, reader: int, rank: int, since: int, only: str = "") -> dict[str, tuple[Any, float]]:
        now, near = self._clock(), self._host(rank) == self._host(reader)
        return {
            name: (value, round(now - at, 2))
            for name, (value, version, at) in self._fields[rank].items()
            if version > since and (not only or name == only) and (near or name != "process")
        }

    def _value(self, rank: int, name: str) -> Any:
        return self._fields.get(rank, {}).get(name, (None,))[0]

    def _host(self, rank: int) -> Any:
        process = self._value(rank, "process")
        return process[0] if isinstance(process, list) and process else None


def _text(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value
