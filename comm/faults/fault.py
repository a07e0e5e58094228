"""A fault that a rank is given on purpose, and when."""

from __future__ import annotations

from dataclasses import dataclass, fields

KINDS = {
    "kill": "its process ends by SIGKILL",
    "stop": "its process stops by SIGSTOP, and goes on after some seconds",
    "unplug": "nothing reaches its sockets for some seconds, as without a cable",
    "notice": "its process gets SIGTERM",
    "error": "its program raises an error at a step",
}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, at one moment; exactly one of `step`, `after` and `at` is given.

    Attributes:
        kind: one of `KINDS`.
        rank: of the process, which has it from its start on. A member that joined has its name for that.
        step: before this step of an algorithm, counted from 0.
        after: so many seconds after `comm.init`.
        at: so many seconds after the job's first process called `comm.init`, if its own has called it by then.
        seconds: how long a stop lasts, or a network that is cut.
        start: how often the launcher has started the ranks again when it happens at a step or after a time.
    """

    kind: str
    rank: int
    step: int | None = None
    after: float | None = None
    at: float | None = None
    seconds: float = 10.0
    start: int = 0

    def __str__(self) -> str:
        """Returns the text of which `parse` makes it."""
        values = [(each.name, getattr(self, each.name), each.default) for each in fields(self)[1:]]
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value, default in values if value != default)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Returns the fault of a text such as "kill:rank=2,step=100".

        Raises:
            ValueError: it makes no sense.
        """
        kind, _, rest = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)} before a colon, got {text!r}")
        given: dict[str, int | float] = {}
        for pair in filter(None, rest.split(",")):
            name, _, value = pair.partition("=")
            if name not in _TYPES:
                raise ValueError(f"{text!r} has {name!r}, expected {', '.join(_TYPES)}")
            try:
                given[name] = _TYPES[name](value)
            except ValueError:
                raise ValueError(f"{text!r} has {name}={value!r}, expected a number") from None
            if not 0 <= given[name] < float("inf"):
                raise ValueError(f"{text!r} has {name}={value!r}, expected a number that is not negative")
        if "rank" not in given or len(given.keys() & {"step", "after", "at"}) != 1:
            raise ValueError(f"{text!r} needs a rank and one moment: rank=2 and step=100, after=30 or at=a time")
        return cls(kind, **given)  # type: ignore[arg-type]


_TYPES: dict[str, type[int] | type[float]] = {
    "rank": int,
    "step": int,
    "after": float,
    "at": float,
    "seconds": float,
    "start": int,
}


def faults_of(text: str) -> list[Fault]:
    """Returns the faults of a list with semicolons.

    Raises:
        ValueError: one makes no sense.
    """
    return [Fault.parse(each.strip()) for each in text.split(";") if each.strip()]
