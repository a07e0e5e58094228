"""Candidates that take turns in training, so that the times of their steps can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

BLOCK = 4  # steps of a turn; the first one hands residuals over or makes buffers, and is not counted


class Turns:
    """Turns of a few steps, each with one candidate.

    A turn follows from the number of steps before it. So all ranks use the same candidate in a step, whatever they measure.
    A machine's speed drifts: each candidate should have several turns, between those of the others.

    Attributes:
        order: label of the candidate of each turn.
        times: seconds of the counted steps, by label.
    """

    def __init__(self, order: Sequence[str], times: dict[str, list[float]], uncounted: int = 0) -> None:
        """Begins with the first turn.

        Args:
            order: see above.
            times: an empty list for each label, to be filled; of equally fast candidates the first one counts.
            uncounted: turns at the beginning that are not counted, because kernels are compiled in them.
        """
        self.order, self.times = list(order), times
        self._uncounted, self._steps = uncounted, 0

    @property
    def ended(self) -> bool:
        """True if all turns are over."""
        return self._steps == BLOCK * len(self.order)

    @property
    def current(self) -> str:
        """Label of the candidate of the step under way, or to come."""
        return self.order[self._steps // BLOCK]

    def took(self, seconds: float) -> None:
        """Takes what the step took, and goes on to the next."""
        turn, place = divmod(self._steps, BLOCK)
        if turn >= self._uncounted and place:
            self.times[self.order[turn]].append(seconds)
        self._steps += 1

    @property
    def seconds(self) -> list[float]:
        """Those of all counted steps, one candidate after the other."""
        return [each for times in self.times.values() for each in times]

    def use_slowest(self, ranks: Iterable[Sequence[float]]) -> None:
        """Replaces the times of one rank by those of the slowest in each step.

        Args:
            ranks: `seconds` of each rank.
        """
        slowest = iter([max(step) for step in zip(*ranks, strict=True)])
        self.times.update({label: [next(slowest) for _ in times] for label, times in self.times.items()})

    @property
    def medians(self) -> dict[str, float]:
        """Of the counted steps, by label."""
        return {label: statistics.median(times) for label, times in self.times.items() if times}

    @property
    def fastest(self) -> str:
        """Label with the least median."""
        medians = self.medians
        return min(medians, key=lambda label: medians[label])


def there_and_back(labels: Sequence[str]) -> list[str]:
    """Two turns of each: a drift of the machine counts alike for all, and one handover less is needed."""
    return [*labels, *reversed(labels)]
