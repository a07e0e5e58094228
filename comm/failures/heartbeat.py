"""What the ranks write into the store of heartbeats, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bagua_kernels.comm.failures.failure import KINDS, Diagnosis
from bagua_kernels.comm.joining.evidence import Process

OPENING = -1  # in place of an operation's number: the connections are being opened
# Number and name of a communicator's last operation, whether it has finished, and the method of the user that began it.
Doing = tuple[int, str, bool, str]
NOTHING: Doing = (-1, "", True, "")


@dataclass(frozen=True)
class Heartbeat:
    """A message that every rank writes again and again while it is alive.

    Attributes:
        beat: its number.
        left: why the rank has left the job; empty while it has not.
        doing: the last operation of each communicator.
        waits: for each communicator the rank of the world whose message the rank waits for.
        begun: operations that the rank has begun so far, of all communicators and mailboxes.
        moved: bytes of these that have left or arrived there.
        process: the rank's process.
    """

    beat: int
    left: str
    doing: Mapping[str, Doing]
    waits: Mapping[str, int]
    process: Process
    begun: int = 0
    moved: int = 0

    def to_json(self) -> str:
        """Returns it as text."""
        return json.dumps({**vars(self), "process": self.process.told()})

    @classmethod
    def parse(cls, text: bytes) -> Heartbeat:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is something else.
        """
        read = _fields(text, cls)
        beat, left, doing, waits = read["beat"], read["left"], read["doing"], read["waits"]
        begun, moved = read["begun"], read["moved"]
        if type(beat) is not int or not isinstance(left, str):
            raise ValueError(f"expected a number and a text, got {beat=} and {left=}")
        if not isinstance(doing, dict) or any(
            not isinstance(one, list) or [type(part) for part in one] != [int, str, bool, str] for one in doing.values()
        ):
            raise ValueError(f"expected operations as [number, name, finished, method], got {doing!r}")
        if not isinstance(waits, dict) or any(type(peer) is not int for peer in waits.values()):
            raise ValueError(f"expected numbers of ranks, got {waits!r}")
        if type(begun) is not int or type(moved) is not int:
            raise ValueError(f"expected numbers of operations and bytes, got {begun=} and {moved=}")
        done: dict[str, Doing] = {name: (one[0], one[1], one[2], one[3]) for name, one in doing.items()}
        return cls(beat, left, done, waits, Process.parse(read["process"]), begun, moved)


def report_to_json(diagnosis: Diagnosis) -> str:
    """Returns a report as text."""
    return json.dumps(asdict(diagnosis))


def parse_report(text: bytes, size: int) -> Diagnosis:
    """Reads what `report_to_json` wrote, in a world of `size` ranks.

    Raises:
        ValueError: if it is something else.
    """
    read = _fields(text, Diagnosis)
    ranks, by = read["ranks"], read["by"]
    if read["kind"] not in KINDS or not isinstance(read["text"], str) or not isinstance(read["communicator"], str):
        raise ValueError(f"expected a diagnosis of kind {' or '.join(KINDS)}, got {read!r}")
    if not isinstance(ranks, list) or any(type(rank) is not int or not 0 <= rank < size for rank in [*ranks, by]):
        raise ValueError(f"expected numbers of ranks below {size}, got {ranks=} and {by=}")
    return Diagnosis(**{**read, "ranks": tuple(ranks)})


def describe(doing: Doing | None) -> str:
    """Returns where in a communicator's operations a rank is, in words."""
    if not doing:
        return "before its first operation"
    number, operation, done, call = doing
    if number == OPENING and operation != "closed":
        return "before its first operation" if done else "opening its connections"
    return f"{'after' if done else 'in'} {operation} #{number}{f' of {call}' * bool(call)}"


def _fields(text: bytes, kind: type[Heartbeat] | type[Diagnosis]) -> dict[str, Any]:
    read = json.loads(text)
    wanted = {field.name for field in fields(kind)}
    if not isinstance(read, dict) or set(read) != wanted:
        raise ValueError(f"expected an object with {', '.join(sorted(wanted))}, got {text[:100]!r}")
    return read
