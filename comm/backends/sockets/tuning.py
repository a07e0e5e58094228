"""Which way of carrying out a collective is used for which size."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

ALL_REDUCE = ("exchange", "doubling", "direct", "halving", "ring", "base")
REDUCE_SCATTER = ALL_GATHER = ("direct", "rounds", "ring", "base")
ALL_TO_ALL = ("direct", "base")
BROADCAST = ("star", "tree", "direct", "chain", "base")
BARRIER = ("direct", "rounds")
WAYS = {
    "all_reduce": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_to_all": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "barrier": BARRIER,
}

Limits = tuple[tuple[float, str], ...]
EVER = float("inf")


class Cost(NamedTuple):
    """What a call costs.

    Attributes:
        seconds: until the slowest rank is through.
        processor: seconds of processor time on a rank.
    """

    seconds: float
    processor: float


@dataclass(frozen=True)
class Tuning:
    """Sizes in bytes up to which each way is used, in ascending order, the last one without a limit.

    `base` stands for the communicator beneath, which is Gloo. The ways are those of `comm/backends/sockets/schedules`.

    Attributes:
        all_reduce: by the bytes of the tensor.
        all_gather: by the bytes of a rank's input.
        reduce_scatter: by the bytes of a rank's output.
        all_to_all: by the bytes for one rank.
        broadcast: by the bytes of the tensor.
        barrier: its bytes are 0.
        piece: bytes of a large tensor that are under way as one, where ranks send to all others.
        link: the same where each rank sends to one other, and small pieces let the next one start early.
        window: how many such pieces are under way at once.
        stripes: sockets between two ranks that are used.
        split: bytes from which on a message is cut over these sockets.
        measured: for each operation, by bytes, what each way costs; empty for a guess.
    """

    all_reduce: Limits = ((16 << 10, "exchange"), (4 << 20, "direct"), (EVER, "ring"))
    all_gather: Limits = ((1 << 20, "direct"), (EVER, "ring"))
    reduce_scatter: Limits = ((1 << 20, "direct"), (EVER, "ring"))
    all_to_all: Limits = ((EVER, "direct"),)
    broadcast: Limits = ((256 << 10, "star"), (EVER, "chain"))
    barrier: Limits = ((EVER, "direct"),)
    piece: int = 4 << 20
    link: int = 512 << 10
    window: int = 8
    stripes: int = 1
    split: int = 256 << 10
    measured: dict[str, list[tuple[int, dict[str, Cost]]]] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` for what cannot be followed."""
        for name, ways in WAYS.items():
            choice: Limits = getattr(self, name)
            limits = [limit for limit, _ in choice]
            if not choice or limits != sorted(limits) or limits[-1] != EVER:
                raise ValueError(f"expected {name} to be (bytes, way) pairs up to infinity, ascending, got {choice}")
            for _, way in choice:
                if way not in ways:
                    raise ValueError(f"{name} knows {', '.join(ways)}, got {way!r}")
        for name in ("piece", "link", "window", "stripes", "split"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {name} to be a whole number, 1 or more, got {value!r}")

    def way(self, operation: str, nbytes: int) -> str:
        """Returns the way for a size."""
        choice: Limits = getattr(self, operation)
        return next(way for limit, way in choice if nbytes <= limit)

    def to_json(self) -> str:
        """Returns it as JSON, in which null stands for the last size's limit, infinity."""
        fields = asdict(self)
        for name in WAYS:
            fields[name] = [(None if limit == EVER else limit, way) for limit, way in fields[name]]
        return json.dumps(fields, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: the text is no tuning.
        """
        try:
            fields = json.loads(text)
            for name, value in fields.items():
                if name == "measured":
                    fields[name] = {
                        operation: [
                            (nbytes, {way: Cost(*cost) for way, cost in costs.items()}) for nbytes, costs in rows
                        ]
                        for operation, rows in value.items()
                    }
                elif name in WAYS:
                    fields[name] = tuple((EVER if limit is None else float(limit), str(way)) for limit, way in value)
            return cls(**fields)
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no tuning: {error}: {text[:200]!r}") from None
