"""The rounds of an outer loop: many steps alone, and then one together."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua_kernels.algorithms.exchanges.vectors import Named, mean_of
from bagua_kernels.algorithms.local_steps.earlier_numbers import nested
from bagua_kernels.algorithms.local_steps.in_step import InStep
from bagua_kernels.algorithms.local_steps.moments import FIRST, SECOND, average_moments
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.local_steps.quorum import Quorum, QuorumCatchUp
from bagua_kernels.algorithms.models.catch_up import CatchUp
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.loop import READS, Loop
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.points import is_left_out
from bagua_kernels.algorithms.models.rounds import Rounds, RoundsOptions
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.comm import Communicator


@dataclass(frozen=True)
class Moments:
    """How often the moments of optimizers are averaged.

    Attributes:
        communicator: of all ranks.
        every: first and second moments: in each so-many-th exchange of all parameters.
        fragments: the number of rounds of such an exchange.
    """

    communicator: Communicator
    every: tuple[int, int]
    fragments: int


class OuterRounds(Rounds):
    """Rounds with outer steps.

    Attributes:
        collection: in step, or a quorum.
        outer: the rounds of all buckets.
        placed: called with the number of rounds whose results are in place, after each of them.
        is_met: returns True if others wait for this rank where it puts a round in place.
    """

    def __init__(
        self,
        local: LocalModel,
        rounds: Sequence[OuterRound],
        plan: Plan,
        options: RoundsOptions,
        collection: InStep | Quorum,
        moments: Moments | None,
    ) -> None:
        """Begins before the first round.

        Args:
            local: as for `Rounds`.
            rounds: as for `Rounds`.
            plan: as for `Rounds`.
            options: as for `Rounds`.
            collection: of the pseudo-gradients.
            moments: how often they are averaged; None for never.
        """
        self.collection, self.outer, self._moments = collection, list(rounds), moments
        self._quorum = collection if isinstance(collection, Quorum) else None
        self.placed: Callable[[int], object] | None = None
        self.is_met: Callable[[], bool] = bool
        super().__init__(local, rounds, plan, options)

    def make_catch_up(self) -> CatchUp:
        """See `Rounds.make_catch_up`."""
        return super().make_catch_up() if self._quorum is None else QuorumCatchUp(weakref.proxy(self), self._quorum)

    @property
    def progress(self) -> int:
        """What outer parameters have come to: the rounds that are in place, or with a quorum the merges that are used."""
        return self.finished if self._quorum is None else self._quorum.merges.used

    def counted(self) -> list[list[int]]:
        """Returns, with a quorum, the last post of each rank that outer parameters follow: see `QuorumMerges.counted`."""
        return [] if self._quorum is None else self._quorum.merges.counted()

    def is_counted(self, part: OuterRound, progress: int, counted: Sequence[Sequence[int]]) -> bool:
        """Returns True if the pseudo-gradient of a bucket, in a round that is lost here, is in outer parameters of another rank.

        Args:
            part: of the bucket.
            progress: of that rank.
            counted: of that rank.
        """
        if self._quorum is None:
            return self.finished < progress
        is_lost = self.unfinished is not None and part.takes_part(self.number)
        return is_lost and self._quorum.merges.is_counted(part.kind.part, counted)

    def under_way_parts(self) -> Iterable[OuterRound]:
        """Returns the rounds of the buckets whose exchanges are under way."""
        return [each for each in self.outer if each.takes_part(self.number)]

    def at_step_end(self) -> None:
        """See `Loop.at_step_end`; a step that a `GradScaler` has left out of an optimizer of this package does not count."""
        if not is_left_out(self.local.optimizer):
            super().at_step_end()

    def begin_round(self) -> None:
        """See `Rounds.begin_round`."""
        before = self.begun
        super().begin_round()
        if self.begun > before:
            self.collection.samples = 0.0

    def wait(self) -> None:
        """See `Loop.wait`; averages moments when that is due."""
        ends, due = self.under_way, self._moments_due() if self.under_way else []
        super().wait()
        if ends and self.placed is not None:
            self.placed(self.finished)
        for names in due:
            assert self._moments is not None
            average_moments(self.local.optimizer, names, self._moments.communicator)

    def _moments_due(self) -> list[tuple[str, ...]]:
        """Returns the names of the moments that are averaged when the round that began last is put in place."""
        if self._moments is None:
            return []
        lap, rest = divmod(self.number + 1, self._moments.fragments)
        kinds = zip(self._moments.every, (FIRST, SECOND), strict=True)
        return [names for every, names in kinds if rest == 0 and lap % every == 0]

    def before_arrival(self, call: str) -> None:
        """See `Rounds.before_arrival`; others may average their moments with this rank's when they put the round in place."""
        reads = self.local.in_step and call in READS
        if self.under_way and not reads and (self._moments_due() or self.is_met()):
            self.wait()

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `Loop.take_written`.

        Raises:
            RuntimeError: with a quorum, after the first round.
        """
        if self._quorum is not None and self.begun and self.options.compares_writes:
            Loop.take_written(self, values)
            raise RuntimeError(
                f"parameters were written after the first round of a {self.local.title} with a quorum, whose ranks have no "
                "common moment for it: write them before, or wrap the module anew"
            )
        super().take_written(values)

    def leaves_own(self) -> bool:
        """See `Loop.leaves_own`: not behind a round of all ranks whose result is in place everywhere."""
        steps = self.local.steps
        number = self.plan.round_at(steps - 1) if steps and not self.under_way else None
        whole = not self.options.delay and self._quorum is None
        return not (number is not None and whole and len(self.parts(number)) == len(self.all))

    def take_steps(self, steps: int) -> None:
        """See `Loop.take_steps`."""
        super().take_steps(steps)
        if self._quorum is not None:
            self._quorum.take_steps(steps, self.plan)

    def stats(self, stats: Stats) -> Stats:
        """See `Loop.stats`."""
        guards: Counter[str] = Counter()
        for each in self.outer:
            if each.weighing is not None:
                guards.update(each.weighing.counts())
        return replace(super().stats(stats), guards=dict(guards))

    def load_vectors(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See `Loop.load_vectors`. Outer parameters and momentum are the same on all ranks, and any number of them."""
        mean = mean_of([state["vectors"] for state in states])
        residuals: dict[str, Named] = {key: mean.pop(key) for key in ("worker", "owner") if key in mean}
        # Sums of differences that earlier versions kept.
        mean.pop("gathered", None)
        # One rank alone may have had none: then they are the parameters, as `restart` has set them.
        mean.setdefault("start", self.local.flat.state().get("start", {}))
        self.local.flat.load(mean)
        numbers = nested(states[0]["numbers"])
        for each in self.outer:
            each.load(residuals)
            each.load_common(numbers)
        if self._quorum is not None:
            self._quorum.load_numbers(numbers)

    def numbers(self) -> dict[str, Any]:
        """See `Loop.numbers`: how the ranks are weighed, and their steps."""
        samples = self.collection.samples
        found = super().numbers() | ({"samples": samples} if samples else {})
        return found if self._quorum is None else found | self._quorum.numbers()

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Loop.load_numbers`."""
        numbers = nested(numbers)
        super().load_numbers(numbers)
        self.collection.samples = numbers.get("samples", 0.0)
