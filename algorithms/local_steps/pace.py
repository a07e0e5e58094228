"""How many steps each rank takes in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Speeds that would change no rank's steps by more than this part change nothing: measured times differ a little anyway.
_NOTICEABLE = 0.1


class Pace:
    """Gives ranks steps in proportion to their speeds, so that all come to a round at about the same time.

    The steps of a round follow from what the ranks measured two rounds before it, which all of them know by then: every rank
    knows the steps of all. They have a mean of about `interval`. Ranks of equal speed take `interval` steps each.

    Attributes:
        steps: of each rank in the round under way.
        rounds: the number of rounds that have begun to be exchanged.
    """

    def __init__(
        self, interval: int, rank: int, size: int, least: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begins with `interval` steps for each rank.

        Args:
            interval: the mean number of steps.
            rank: this rank.
            size: the number of ranks.
            least: no rank takes fewer steps.
            clock: seconds.
        """
        self._interval, self._rank, self._least, self._clock = interval, rank, least, clock
        self.steps = [interval] * size
        self.rounds = 0
        self._speeds: list[float] = []
        self._end = interval
        self._began = clock()
        self._waited = 0.0

    def is_end(self, step: int) -> bool:
        """True if the round under way ends with a step of this rank, counted from 0."""
        return step + 1 == self._end

    def speed(self, waited: float) -> float:
        """Returns this rank's steps per second in the round that ends now.

        Args:
            waited: seconds for which training has waited for exchanges so far, which are left out.
        """
        seconds = self._clock() - self._began - (waited - self._waited)
        return self.steps[self._rank] / max(seconds, 1e-9)

    def measured(self, speeds: Sequence[float]) -> None:
        """Takes the speeds of all ranks in the round whose exchange is under way; equal on all ranks."""
        self._speeds = list(speeds)

    def next_round(self, steps: Sequence[int], waited: float) -> None:
        """Begins a round.

        Args:
            steps: of each rank: what `planned` returned before the exchange of the last round began.
            waited: as for `speed`.
        """
        self.rounds += 1
        self.steps = list(steps)
        self._end += self.steps[self._rank]
        self._began, self._waited = self._clock(), waited

    def planned(self) -> list[int]:
        """Returns the steps of each rank in the next round.

        Call it before the exchange of this round begins. Later, this round's speeds may be known on one rank and not on another.
        """
        if not self._speeds:
            return self.steps
        mean = sum(self._speeds) / len(self._speeds)
        exact = [self._interval * speed / mean for speed in self._speeds]
        if all(abs(new - old) <= _NOTICEABLE * old for new, old in zip(exact, self.steps, strict=True)):
            return self.steps
        return [max(self._least, round(steps)) for steps in exact]

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {"rounds": self.rounds, "end": self._end, "steps": list(self.steps), "speeds": list(self._speeds)}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned."""
        self.steps, self._speeds = list(numbers["steps"]), list(numbers.get("speeds", []))
        self.rounds, self._end = numbers["rounds"], numbers["end"]

    def restart(self, steps: int) -> None:
        """Begins a round after a number of steps, with as many steps for each rank."""
        self.steps = [self._interval] * len(self.steps)
        self._speeds, self._end = [], steps + self._interval
