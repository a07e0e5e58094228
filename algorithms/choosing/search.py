"""Which candidate is tried when, and what follows from the times of steps; all ranks give it the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bagua_kernels.algorithms.choosing.turns import Turns, there_and_back

_FEW = 2  # variations, the base among them, that have two turns each
TRIES = 3
_WORTH = 1.5  # predicted times of the best within which a candidate is tried
EXACT_STEPS = 4  # with plain means, which take long on slow links
_WARM = 1  # of these that are not measured
WINDOW = 25  # steps from one look at the network to the next
_WINDOWS = 2  # looks that have to be off, one after the other
_DRIFT = 1.5
_GAIN = 0.95  # of the time of the best: what a variation of it may take to be worth it; turns differ by some per cent

State = Literal["measuring", "trying", "chosen"]


@dataclass
class Search:
    """The states of a choice: measuring, trying, chosen, and back to trying where the network has changed.

    First the best of the predicted take turns, then the fastest of them and its variations.

    Attributes:
        plain: label of the exact mean.
        variations: of each label, the same exchange with other sockets, one exchange at a time, and so on.
        tries: how many are tried before variations.
        state: what it is at.
        current: label of what averages gradients now.
        predicted: seconds of a step, by label; empty until measured.
        tried: seconds of counted steps, by label, of the trial under way or the last one.
        reason: why the choice was made.
        slower: by which factor bytes have become slower than when they were measured; 1 at first.
        exact_steps: with plain means at first, 2 or more; the first one is not measured.
    """

    plain: str
    variations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tries: int = TRIES
    state: State = "measuring"
    current: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    tried: dict[str, list[float]] = field(default_factory=dict)
    reason: str = ""
    slower: float = 1.0
    exact_steps: int = EXACT_STEPS
    _steps: int = 0
    _turns: Turns = field(default_factory=lambda: Turns([], {}))
    _base: str = ""
    _usual: float = 0.0
    _off: int = 0

    def __post_init__(self) -> None:
        """Begins with the plain mean."""
        self.current = self.current or self.plain

    def restart(self) -> None:
        """Begins anew with the plain mean: ranks are others."""
        self.state, self.current, self.reason, self.slower = "measuring", self.plain, "", 1.0
        self.predicted, self.tried, self._base = {}, {}, ""
        self._steps, self._off, self._usual = 0, 0, 0.0

    @property
    def counts(self) -> bool:
        """True if the step under way is measured with plain means."""
        return self.state == "measuring" and self._steps >= _WARM

    @property
    def measured(self) -> bool:
        """True when enough steps are measured: the facts are due now."""
        return self.state == "measuring" and self._steps == self.exact_steps

    def note(self) -> None:
        """Counts a step with plain means."""
        self._steps += 1

    def begin(self, predicted: Mapping[str, float]) -> None:
        """Begins to try the best of the predicted, in turns.

        Args:
            predicted: seconds of a step, by label, of all candidates in an order that is the same on all ranks.
        """
        self.predicted = dict(predicted)
        ranked = sorted(predicted, key=lambda label: predicted[label])
        chosen = [label for label in ranked[: self.tries] if predicted[label] <= _WORTH * predicted[ranked[0]]]
        if self.plain not in chosen and predicted[self.plain] <= _WORTH * predicted[ranked[0]]:
            chosen.append(self.plain)
        self.state, self.tried, self._base = "trying", {label: [] for label in chosen}, ""
        if len(chosen) == 1:
            self._vary(chosen[0], f"predicted to be {_WORTH:g} times as fast as all others")
            return
        self._take_turns(there_and_back(chosen), self.tried)

    def _take_turns(self, order: list[str], times: dict[str, list[float]]) -> None:
        self._turns = Turns(order, times)
        self.current = self._turns.current

    def took(self, seconds: float) -> None:
        """Takes what a step of a trial took on the slowest rank, and goes on to what is next."""
        turns = self._turns
        turns.took(seconds)
        if not turns.ended:
            self.current = turns.current
        elif not self._base:
            self._vary(turns.fastest, "the fastest of those that were tried")
        else:
            fastest, medians = turns.fastest, turns.medians
            better = medians[fastest] < _GAIN * medians[self._base]
            self.tried |= {label: [*self.tried.get(label, []), *times] for label, times in turns.times.items()}
            self._choose(fastest if better else self._base, self.reason)

    def _vary(self, label: str, reason: str) -> None:
        """Goes on with one that is carried out in other ways, too, if there are any."""
        self.reason = reason
        if not self.variations.get(label):
            self._choose(label, reason)
            return
        self._base = label
        labels = [label, *self.variations[label]]
        # Times of this round alone are compared with each other.
        order = there_and_back(labels) if len(labels) <= _FEW else labels
        self._take_turns(order, {name: [] for name in labels})

    def _choose(self, label: str, reason: str) -> None:
        self.current, self.state, self.reason = label, "chosen", reason
        self._steps, self._off = 0, 0

    def rest(self) -> bool:
        """Counts a step after the choice; returns True if it is time to look at the network."""
        self._steps += 1
        return self._steps % WINDOW == 0

    def drifted(self, seconds: float, least: float) -> bool:
        """Takes what a step's bytes take now; returns True if the choice is to be made again.

        Args:
            seconds: of them, on the slowest rank; above 0.
            least: a difference of so many seconds matters.
        """
        if not self._usual:
            self._usual = seconds
            return False
        factor = seconds / self._usual
        off = max(factor, 1 / factor) > _DRIFT and abs(seconds - self._usual) > least
        # One look alone may have met other work.
        self._off = self._off + 1 if off else 0
        if self._off < _WINDOWS:
            return False
        self.slower *= factor
        self._usual = seconds
        return True

    def save(self) -> list[Any]:
        """Plain values, the same on all ranks."""
        return [self.state, self.current, self.predicted, self.tried, self.reason, self.slower, self._usual]

    def load(self, saved: Sequence[Any]) -> None:
        """Restores a choice. A trial that was under way has to `begin` again, with predictions that fit here."""
        self.state, self.current, self.predicted, self.tried, self.reason, self.slower = (
            saved[0],
            saved[1],
            dict(saved[2]),
            {label: list(times) for label, times in saved[3].items()},
            saved[4],
            saved[5],
        )
        self._steps, self._off = 0, 0
        # States of before have no seconds to compare with.
        self._usual = saved[6] if len(saved) > 6 else 0.0
