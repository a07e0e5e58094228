"""What the operating system knows of the processes of other ranks, whatever their interpreters do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

State = Literal["there", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class Process:
    """A process that another one on the same host can look up.

    Attributes:
        table: the name of the process table of `pid`: the running kernel and its namespace. Empty if the operating system
            has no /proc.
        pid: the number of the process.
        started: the time at which it started, in ticks since the host started; a later process of the same number has
            another one.
    """

    table: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        """Returns the process that calls this."""
        pid = os.getpid()
        found = _stat(pid) if _table() else None
        return cls("", pid, 0) if found is None else cls(_table(), pid, found[1])

    @classmethod
    def parse(cls, fields: Any) -> Process:
        """Returns the process that another rank described by `fields`, a list as `told` makes it.

        Raises:
            ValueError: if it describes none.
        """
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, int, int] or fields[1] < 1:
            raise ValueError(f"expected a process as [table, pid, started], got {fields!r}")
        return cls(*fields)

    def told(self) -> list[str | int]:
        """Returns the fields as a list, for JSON."""
        return [self.table, self.pid, self.started]

    def state(self) -> State:
        """Returns "there", "stopped" (by SIGSTOP or a debugger), "gone", or "unknown" if it cannot be seen from here."""
        if not self.table or self.table != _table():
            return "unknown"
        found = _stat(self.pid)
        if found is None or found[1] != self.started or found[0] in "ZXx":
            return "gone"
        return "stopped" if found[0] in "Tt" else "there"


class Evidence:
    """The processes of the ranks, as far as they are known.

    Where /proc hides the processes of other users, a process counts as gone only if it has been seen before.
    """

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self._seen: set[int] = set()

    def add(self, rank: int, process: Process) -> None:
        """Notes which process a rank is, and looks at it for the first time."""
        if self._processes.get(rank) != process:
            self._processes[rank] = process
            self._seen.discard(rank)
            self.state(rank)

    def state(self, rank: int) -> State:
        """Returns the state of a rank's process; "unknown" on other hosts."""
        process = self._processes.get(rank)
        state = "unknown" if process is None else process.state()
        if state in ("there", "stopped"):
            self._seen.add(rank)
        if state == "gone" and rank not in self._seen and _stat(1) is None:
            return "unknown"
        return state

    def pid(self, rank: int) -> int:
        """Returns the number of a rank's process, 0 if it is not known."""
        return self._processes[rank].pid if rank in self._processes else 0


def text_of(path: str | Path) -> str:
    """Returns what a file contains, or an empty text: not every system has the files of Linux."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Returns a text that distinguishes hosts of the same name; empty if the operating system has none."""
    return text_of("/proc/sys/kernel/random/boot_id")


@cache
def _table() -> str:
    """Returns a name of the process table of this process, or an empty text."""
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}" if boot_id() else ""
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns the letter of a process's state and when it started, or None if there is no such process."""
    found = stat_of(pid)
    return None if found is None else (found[1][0], int(found[1][19]))


def stat_of(pid: int) -> tuple[str, list[str]] | None:
    """Returns a process's command and the fields after it: its state, its parent, ...; None if there is no such process."""
    try:
        # The name of the command stands in brackets and may hold anything.
        head, _, fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    return head.partition("(")[2], fields.split()
