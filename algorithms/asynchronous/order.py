"""The order of what a rank's two threads do to its model: recorded in one run, and followed in another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bagua_kernels.comm.mailbox.triggered import Execution
from bagua_kernels.errors import CommunicationError


@dataclass(frozen=True)
class Event:
    """What was done to a model.

    Attributes:
        kind: "forward" and "bring": what was owed became part of the parameters, before a pass of training or elsewhere.
            "write": the optimizer began a step. "step": it has taken it. "read": the courier copied the model. "receive": a
            version was executed, and its result is kept. "owe": a difference is owed. "rest" and "resume": training leaves the
            model as it is in between.
        execution: of "receive".
    """

    kind: str
    execution: Execution | None = None


class Order:
    """The events of one rank, in their order.

    Args:
        record: a file to which they are written when `save` is called; None for none.
        replay: the events of an earlier run, which this one follows.
    """

    def __init__(self, record: Path | None = None, replay: Iterable[Event] | None = None) -> None:
        self._record = record
        self._replay = None if replay is None else list(replay)
        self.events: list[Event] = []

    def is_next(self, event: Event) -> bool:
        """Returns True if the replayed record goes on with this event, or no record is replayed.

        Raises:
            CommunicationError: the record has ended, so that this run is another one.
        """
        if self._replay is None:
            return True
        if len(self.events) == len(self._replay):
            raise CommunicationError(f"the replayed record has ended after {len(self.events)} events, before {event}")
        return self._replay[len(self.events)] == event

    def add(self, event: Event) -> None:
        """Adds an event."""
        self.events.append(event)

    def save(self) -> None:
        """Writes the record, if it is to be written: a line of JSON for each event."""
        if self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps([event.kind, event.execution and asdict(event.execution)]) for event in self.events)
            self._record.write_text("".join(f"{line}\n" for line in lines))


def file_of(folder: str | Path, rank: int) -> Path:
    """The file of a rank's record in a folder."""
    return Path(folder) / f"rank{rank}.jsonl"


def load(file: Path) -> list[Event]:
    """Reads a record.

    Raises:
        ValueError: a line is no event.
    """
    events = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            kind, execution = json.loads(line)
            found = None if execution is None else Execution(**{**execution, "members": tuple(execution["members"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of {file} is no event of a record: {line[:80]!r}") from error
        events.append(Event(kind, found))
    return events
