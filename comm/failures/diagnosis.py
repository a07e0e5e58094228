"""Who was at fault when a communication failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["lost", "closed", "late", "mismatch", "link", "stalled", "unknown"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Diagnosis:
    """Who was at fault.

    Attributes:
        kind: "lost" (died or unreachable), "closed" (left this communicator), "late" (alive, but not in the operation),
            "mismatch" (called another operation). "link": the connection between two ranks broke, both are alive.
            "stalled": nothing comes through it. Else "unknown".
        ranks: the ranks at fault, as numbers of the world.
        text: how it showed.
        communicator: the name of the communicator whose operation failed.
        by: the rank that found out.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    communicator: str
    by: int

    def concerns(self, communicator: str, members: Sequence[int]) -> bool:
        """Returns True if it explains a failure of a communicator of these ranks."""
        return bool(set(self.ranks) & set(members)) if self.kind == "lost" else self.communicator == communicator
