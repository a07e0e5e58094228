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
        self._exchanged, self._left = list(pace.steps), list(pace.steps)

    def round_at(self, step: int) -> int | None:
        """See `Plan.round_at`."""
        return self._pace.rounds if self._pace.is_end(step) else None

    def steps_of(self, ranks: int) -> list[int]:
        """See `Plan.steps_of`."""
        return list(self._pace.steps) if len(self._pace.steps) == ranks else super().steps_of(ranks)

    def left(self, steps: int, ranks: int) -> list[int]:
        """See `Plan.left`."""
        return list(self._left) if len(self._left) == ranks else super().steps_of(ranks)

    def speed(self, waited: float) -> float:
        """See `Plan.speed`."""
        return self._pace.speed(waited)

    def begins(self) -> None:
        """See `Plan.begins`."""
        self._planned, self._exchanged = self._pace.planned(), list(self._pace.steps)

    def begun(self, waited: float) -> None:
        """See `Plan.begun`."""
        self._pace.next_round(self._planned, waited)

    def restart(self, steps: int) -> None:
        """See `Plan.restart`."""
        self._pace.restart(steps)

    def report(self, steps: int, lost: int | None) -> list[int]:
        """See `Plan.report`: the number of the round that comes next, and this rank's steps in it so far, and still to take."""
        if lost is not None:
            return [lost, self._exchanged[self._pace.rank], 0]
        left = max(1, self._pace.end - steps)
        return [self._pace.rounds, self._pace.steps[self._pace.rank] - left, left]

    def agreed(self, reports: Mapping[int, Any], ranks: int) -> list[Any]:
        """See `Plan.agreed`: the number of the next round; of each rank the steps of that, and those that are still to take.

        A round that was lost on some ranks is made again after the next step.
        """
        lost = [number for number, _, left in reports.values() if not left]
        interval = 1 if lost else self._interval
        told = [reports.get(rank, (0, 0, interval)) for rank in range(ranks)]
        left = [1 if lost else own for _, _, own in told]
        steps = [taken + own for (_, taken, _), own in zip(told, left, strict=True)]
        return [max(lost) if lost else max(number for number, _, _ in reports.values()), steps, left]

    def go_on(self, steps: int, agreed: Any) -> int:
        """See `Plan.go_on`."""
        number, planned, self._left = agreed
        self._planned = self._exchanged = list(planned)
        self._pace.go_on(number, planned, steps, self._left[self._pace.rank])
        return int(number)

    def numbers(self) -> dict[str, Any]:
        """See `Plan.numbers`."""
        return {"pace": self._pace.numbers()}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Plan.load_numbers`."""
        if "pace" in numbers:
            self._pace.load(numbers["pace"])
