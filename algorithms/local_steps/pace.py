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
        rank: this one.
        steps: of each rank in the round under way.
        rounds: the number of rounds that have begun to be exchanged.
        end: steps of this rank at the end of the round under way, of all its steps.
    """

    def __init__(
        self,
        interval: int,
        rank: int,
        size: int,
        least: int,
        clock: Callable[[], float] = time.perf_counter,
        waited: float = 0.0,
    ) -> None:
        """Begins with `interval` steps for each rank.

        Args:
            interval: the mean number of steps.
            rank: this rank.
            size: the number of ranks.
            least: no rank takes fewer steps.
            clock: seconds.
            waited: seconds for which training has waited for exchanges before.
        """
        self._interval, self.rank, self._least, self._clock = interval, rank, least, clock
        self.steps = [interval] * size
        self.rounds = 0
        self._speeds: list[float] = []
        self.end = self._timed = interval
        self._began = clock()
        self._waited = waited

    def is_end(self, step: int) -> bool:
        """True if the round under way ends with a step of this rank, counted from 0."""
        return step + 1 == self.end

    def speed(self, waited: float) -> float:
        """Returns this rank's steps per second in the round that ends now.

        Args:
            waited: seconds for which training has waited for exchanges so far, which are left out.
        """
        seconds = self._clock() - self._began - (waited - self._waited)
        return self._timed / max(seconds, 1e-9)

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
        self._timed = self.steps[self.rank]
        self.end += self._timed
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

    def go_on(self, rounds: int, steps: Sequence[int], taken: int, left: int) -> None:
        """Goes on in the middle of a round, when ranks have become others: their speeds are measured anew.

        Args:
            rounds: that have begun to be exchanged.
            steps: of each rank in the round under way.
            taken: steps of this rank so far, of all its steps.
            left: steps of this rank to the end of the round.
        """
        self.rounds, self.steps, self._speeds = rounds, list(steps), []
        self.end, self._timed = taken + left, left

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {"rounds": self.rounds, "end": self.end, "steps": list(self.steps), "speeds": list(self._speeds)}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned."""
        self.steps, self._speeds = list(numbers["steps"]), list(numbers.get("speeds", []))
        self.rounds, self.end = numbers["rounds"], numbers["end"]
        self._timed = self.steps[self.rank]

    def restart(self, steps: int) -> None:
        """Begins a round after a number of steps, with as many steps for each rank."""
        self.steps = [self._interval] * len(self.steps)
        self._speeds, self.end, self._timed = [], steps + self._interval, self._interval
