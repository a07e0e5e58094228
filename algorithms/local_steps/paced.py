"""Rounds of different numbers of steps on different ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.models.plan import Plan


class PacedPlan(Plan):
    """A round where a rank has taken its steps in proportion to its speed; see `Pace`."""

    def __init__(self, pace: Pace, interval: int) -> None:
        """Begins before the first step.

        Args:
            pace: of the ranks.
            interval: the mean number of steps.
        """
        super().__init__(interval)
        self._pace, self._planned = pace, list(pace.steps)

    def round_at(self, step: int) -> int | None:
        """See `Plan.round_at`."""
        return self._pace.rounds if self._pace.is_end(step) else None

    def steps_of(self, ranks: int) -> list[int]:
        """See `Plan.steps_of`."""
        return list(self._pace.steps)

    def speed(self, waited: float) -> float:
        """See `Plan.speed`."""
        return self._pace.speed(waited)

    def begins(self) -> None:
        """See `Plan.begins`."""
        self._planned = self._pace.planned()

    def begun(self, waited: float) -> None:
        """See `Plan.begun`."""
        self._pace.next_round(self._planned, waited)

    def restart(self, steps: int) -> None:
        """See `Plan.restart`."""
        self._pace.restart(steps)

    def numbers(self) -> dict[str, Any]:
        """See `Plan.numbers`."""
        return {"pace": self._pace.numbers()}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Plan.load_numbers`."""
        if "pace" in numbers:
            self._pace.load(numbers["pace"])
