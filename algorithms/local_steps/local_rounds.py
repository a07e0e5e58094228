"""When rounds of local steps begin, and how the ranks are weighed in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.moments import FIRST, SECOND, average_moments
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.weighing import Weighing
from bagua_kernels.algorithms.rounds.points import is_left_out
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Work
from bagua_kernels.comm.work import FINISHED


class LocalOptions(RoundOptions):
    """Keyword arguments of `LocalRounds`."""

    sync_state: tuple[int, int] | None
    penalty: Penalty | None
    by_speed: bool


class LocalRounds(RoundAlgorithm):
    """Base of `OuterLoop`: rounds of many steps, maybe of different numbers of steps on different ranks.

    Attributes:
        fragments: the number of rounds in which each parameter is exchanged once.
        weighs: False if all ranks have the same weight, whatever their numbers of samples.
        sync_state: see `OuterLoop`.
        penalty: see `OuterLoop`.
        by_speed: see `OuterLoop`.
    """

    due = "forward"
    # Steps that are left out do not count here.
    cure_of_lateness = "with fewer batches on some ranks, train within join()"
    # Residuals and two passes take several collectives.
    several = True
    fragments = 1
    weighs = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sync_state: tuple[int, int] | None,
        penalty: Penalty | None,
        by_speed: bool,
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks; arguments as for `OuterLoop`."""
        if sync_state is not None and (len(sync_state) != 2 or min(sync_state) < 1):
            raise ValueError(f"sync_state must be two numbers of rounds, each at least 1, or None, got {sync_state=}")
        self.sync_state, self.penalty, self.by_speed = sync_state, penalty, by_speed
        self._rounds: Communicator | None = None
        self._pace: Pace | None = None
        self._weighing: Weighing | None = None
        self._samples = 0.0
        super().__init__(module, optimizer, **options)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        self._rounds = self._communicator.duplicate()
        rank, size = self._communicator.rank, self._communicator.size
        if self.by_speed:
            self._pace = Pace(self.interval, rank, size, least=self.delay + 1)
        if size > 1 and (self.by_speed or self.penalty is not None):
            self._weighing = Weighing(self.rounds, len(self.flat.buckets), self.penalty, self._pace)

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), guards={} if self._weighing is None else self._weighing.counts())

    @property
    def rounds(self) -> Communicator:
        """The communicator of the exchanges."""
        assert self._rounds is not None
        return self._rounds

    @property
    def ranks(self) -> Communicator:
        """The communicator of all ranks, for calls to which all come."""
        return self._communicator

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._communicator.rank

    @property
    def steps_of_ranks(self) -> list[int]:
        """The steps that each rank takes in the round under way."""
        return [self.interval] * self._communicator.size if self._pace is None else list(self._pace.steps)

    def count_samples(self, samples: float) -> None:
        """Adds to this rank's samples in the round under way; without it each step counts as one.

        Call it for each batch on all ranks, where batches differ in size.

        Args:
            samples: of a batch.
        """
        self._samples += samples

    def turn_at(self, step: int) -> int | None:
        """See `RoundAlgorithm.turn_at`."""
        if self._pace is None:
            return super().turn_at(step)
        return self._pace.rounds if self._pace.is_end(step) else None

    def at_step_end(self) -> None:
        """See `ModelAlgorithm.at_step_end`; a step that a `GradScaler` has left out of an optimizer of this package is none."""
        if not is_left_out(self._optimizer):
            super().at_step_end()

    def _begin(self) -> None:
        """See `RoundAlgorithm._begin`."""
        ends = self.turn_at(self._steps) is not None
        planned = self._pace.planned() if ends and self._pace is not None else []
        super()._begin()
        if ends:
            self._samples = 0.0
            if self._pace is not None:
                self._pace.next_round(planned, self._wait_seconds)

    def weighed(self, difference: Bucket, exchange: Iterator[Work]) -> Iterator[Work]:
        """Runs the exchange of a bucket's pseudo-gradient beside training, with the ranks' weights before it.

        Args:
            difference: the pseudo-gradient.
            exchange: replaces it by its mean.
        """
        weighing, pace = self._weighing, self._pace
        samples = (self._samples or self.steps_of_ranks[self.rank]) if self.weighs else 1.0
        speed = 0.0 if pace is None else pace.speed(self._wait_seconds)
        # The training thread goes on from here.
        yield FINISHED
        if weighing is not None:
            yield from weighing.weigh(difference, samples, speed)
        if self._communicator.size > 1:
            yield from exchange
            difference.clear_gaps(difference.flat)
        if weighing is not None:
            yield from weighing.clip(difference)

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`; averages moments when that is due."""
        was_under_way = self._under_way
        super().wait()
        if was_under_way and self.sync_state is not None:
            lap, rest = divmod(self._turn + 1, self.fragments)
            for every, names in zip(self.sync_state, (FIRST, SECOND), strict=True):
                if rest == 0 and lap % every == 0:
                    average_moments(self._optimizer, names, self.rounds)

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """See `RoundAlgorithm.join`.

        Raises:
            RuntimeError: ranks take steps in proportion to their speeds.
        """
        if self.by_speed:
            raise RuntimeError("with by_speed=True no rank can join() early: RoundSampler ends all at the same round")
        with super().join(optimizer):
            yield

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`: how the ranks are weighed, and their steps."""
        parts = [part for part in (self._weighing, self._pace) if part is not None]
        found = {name: value for part in parts for name, value in part.numbers().items()}
        return found | ({"samples": self._samples} if self._samples else {})

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """See `ModelAlgorithm.load_numbers`."""
        self._samples = numbers.get("samples", 0.0)
        if self._weighing is not None:
            self._weighing.load(numbers)
        if self._pace is not None and "rounds" in numbers:
            self._pace.load(numbers)

    def _take_steps(self, steps: int) -> None:
        """See `Algorithm._take_steps`."""
        super()._take_steps(steps)
        if self._pace is not None:
            self._pace.restart(steps)

    def _communicators(self) -> list[Communicator]:
        """See `Algorithm._communicators`."""
        return [*super()._communicators(), *([] if self._rounds is None else [self._rounds])]
