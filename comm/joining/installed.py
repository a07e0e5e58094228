"""Which package a rank runs: ranks of two versions would compute by different rules, or misread each other's bytes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagua_kernels.errors import MismatchError

WIRE_FORMAT = 4  # one more whenever the bytes of a message change, in payloads, letters, frames or heartbeats
UNKNOWN = "of before 0.1.0"


@dataclass(frozen=True)
class Installed:
    """What a rank runs.

    Attributes:
        version: of this package.
        wire_format: a number that changes with the bytes of messages.
    """

    version: str
    wire_format: int

    @classmethod
    def here(cls) -> Installed:
        """Returns what this process runs."""
        # Not imported, for the package imports this file.
        return cls(sys.modules["bagua_kernels"].__version__, WIRE_FORMAT)

    @classmethod
    def parse(cls, told: Any) -> Installed:
        """Parses what `told` of another rank returned; versions that sent nothing are as different as any."""
        if isinstance(told, dict) and isinstance(told.get("version"), str) and isinstance(told.get("wire_format"), int):
            return cls(told["version"][:100], told["wire_format"])
        return cls(UNKNOWN, 0)

    def told(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return vars(self).copy()

    def __str__(self) -> str:
        """Returns it in words."""
        return f"bagua_kernels {self.version} (wire format {self.wire_format})"


def check_installed(found: Mapping[int, Installed]) -> None:
    """Compares what ranks run.

    Raises:
        MismatchError: if they run different versions; it names those that run another one than most.
    """
    if len(set(found.values())) > 1:
        raise mismatch({rank: str(one) for rank, one in found.items()}, "install the same version on all hosts")


def mismatch(found: Mapping[int, str], cure: str) -> MismatchError:
    """Returns the error for values that should be equal.

    Args:
        found: the value of each rank, in words.
        cure: what to change.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(found.items()):
        ranks.setdefault(value, []).append(rank)
    told = [f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))} ha{'ve' if len(some) > 1 else 's'} {value}"
            for value, some in ranks.items()]  # fmt: skip
    (common, count), *_ = Counter(found.values()).most_common(1)
    differing = [rank for rank, value in found.items() if value != common or 2 * count <= len(found)]
    return MismatchError(f"the ranks do not belong together: {'; '.join(told)}: {cure}", differing)
