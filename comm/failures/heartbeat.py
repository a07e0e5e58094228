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
_DOING = "doing/"
_UNKNOWN = Process("", 0, 0)


@dataclass(frozen=True)
class Heartbeat:
    """A message that every rank writes again and again while it is alive.

    It is written and read in fields, of which only those that have changed are sent. The last operation of each
    communicator is a field of its own.

    Attributes:
        left: why the rank has left the job; empty while it has not.
        doing: the last operation of each communicator.
        waits: for each communicator the rank of the world whose message the rank waits for.
        process: the rank's process.
        begun: operations that the rank has begun so far, of all communicators and mailboxes.
        moved: bytes of these that have left or arrived there.
    """

    left: str
    doing: Mapping[str, Doing]
    waits: Mapping[str, int]
    process: Process
    begun: int = 0
    moved: int = 0

    def to_fields(self) -> dict[str, Any]:
        """Returns it in fields, as values of JSON."""
        fields = {"process": self.process.told(), "begun": self.begun, "moved": self.moved}
        fields |= {f"{_DOING}{name}": list(doing) for name, doing in self.doing.items()}
        # Fields that are mostly empty are left out then.
        return fields | {name: value for name, value in (("left", self.left), ("waits", dict(self.waits))) if value}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Heartbeat:
        """Reads what `to_fields` returned, or some of its fields.

        Raises:
            ValueError: if it is something else.
        """
        read, doing = dict[str, Any](fields), dict[str, Doing]()
        for name in [name for name in read if name.startswith(_DOING)]:
            one = read.pop(name)
            if not isinstance(one, list) or [type(part) for part in one] != [int, str, bool, str]:
                raise ValueError(f"expected an operation as [number, name, finished, method], got {one!r}")
            doing[name.removeprefix(_DOING)] = (one[0], one[1], one[2], one[3])
        left, waits, process = read.pop("left", ""), read.pop("waits", {}), read.pop("process", None)
        begun, moved = read.pop("begun", 0), read.pop("moved", 0)
        if not isinstance(left, str):
            raise ValueError(f"expected a text, got {left=}")
        if not isinstance(waits, dict) or any(type(peer) is not int for peer in waits.values()):
            raise ValueError(f"expected numbers of ranks, got {waits!r}")
        if type(begun) is not int or type(moved) is not int:
            raise ValueError(f"expected numbers of operations and bytes, got {begun=} and {moved=}")
        if read:
            raise ValueError(f"expected no other fields, got {', '.join(sorted(read))}")
        return cls(left, doing, waits, _UNKNOWN if process is None else Process.parse(process), begun, moved)

    @staticmethod
    def field_of(communicator: str) -> str:
        """Returns the name of the field with the last operation of a communicator."""
        return f"{_DOING}{communicator}"


def report_to_json(diagnosis: Diagnosis) -> str:
    """Returns a report as text."""
    return json.dumps(asdict(diagnosis))


def parse_report(text: str, size: int) -> Diagnosis:
    """Reads what `report_to_json` wrote, in a world of `size` ranks.

    Raises:
        ValueError: if it is something else.
    """
    read = json.loads(text)
    wanted = {field.name for field in fields(Diagnosis)}
    if not isinstance(read, dict) or set(read) != wanted:
        raise ValueError(f"expected an object with {', '.join(sorted(wanted))}, got {text[:100]!r}")
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
