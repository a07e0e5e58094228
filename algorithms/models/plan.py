"""Which steps of training have a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Plan:
    """One round in a number of steps, maybe after a first phase with one for each step."""

    def __init__(self, interval: int, first_phase: int = 0) -> None:
        """Begins before the first step.

        Args:
            interval: the number of steps for which there is one round.
            first_phase: the number of steps, from the first one on, that have a round each.
        """
        self._interval, self._first_phase = interval, first_phase

    def round_at(self, step: int) -> int | None:
        """Returns the number of the round that belongs to a step; None if there is none.

        Args:
            step: number of the optimizer's step, from 0.
        """
        if step < self._first_phase:
            return step
        rounds, rest = divmod(step - self._first_phase + 1, self._interval)
        return None if rest else self._first_phase + rounds - 1

    def before(self, steps: int) -> int:
        """Returns the number of rounds that have begun after a number of steps."""
        found = (self.round_at(step) for step in range(steps - 1, -1, -1))
        return next((number + 1 for number in found if number is not None), 0)

    def steps_of(self, ranks: int) -> list[int]:
        """Returns the steps that each of so many ranks takes in the round under way."""
        return [self._interval] * ranks

    def speed(self, waited: float) -> float:
        """Returns this rank's steps per second in the round that ends now; 0 if nothing depends on it.

        Args:
            waited: seconds for which training has waited for exchanges so far.
        """
        return 0.0

    def begins(self) -> None:
        """Called before the exchanges of a round begin."""

    def begun(self, waited: float) -> None:
        """Called when they have begun.

        Args:
            waited: seconds for which training has waited for exchanges so far.
        """

    def restart(self, steps: int) -> None:
        """Goes on with a number of steps."""

    def left(self, steps: int, ranks: int) -> list[int]:
        """Returns the steps that each rank has still to take in the round under way, when ranks have just become others.

        Args:
            steps: that were taken.
            ranks: their number.
        """
        step = steps
        while self.round_at(step) is None:
            step += 1
        return [step + 1 - steps] * ranks

    def report(self, steps: int, lost: int | None) -> Any:
        """Returns what other ranks are to know of this one when ranks are lost or join; None where all take as many steps.

        Args:
            steps: that were taken.
            lost: the number of the round that has begun, and whose results are not in place; None if there is none.
        """
        return None

    def agreed(self, reports: Mapping[int, Any], ranks: int) -> Any:
        """Returns how ranks go on that have reported something, and others that are new, for `go_on`.

        Args:
            reports: what `report` has returned, by rank.
            ranks: the number of all.
        """
        return None

    def go_on(self, steps: int, agreed: Any) -> int:
        """Goes on with a number of steps, after `restart`, as ranks have agreed; returns the number of the next round."""
        return self.before(steps)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned."""
