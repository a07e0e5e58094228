"""One bucket of parameters in an outer loop: its pseudo-gradient, and the outer step by their mean."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.local_steps.agreement import Agreement
from bagua_kernels.algorithms.local_steps.kind import OuterKind, kind_of
from bagua_kernels.algorithms.local_steps.weighing import Weighing
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import BLENDED, REBASED


@dataclass(frozen=True)
class OuterSettings:
    """What the rounds of all buckets have in common.

    Attributes:
        fragments: the number of rounds in which each parameter is exchanged once.
        blend: the share of this rank's parameters when a result is used; None for none.
        rebases: True if parameters move as `start` does, so that no local step is lost.
        follows_writes: True if outer parameters become what parameters were written to.
    """

    fragments: int = 1
    blend: float | None = None
    rebases: bool = False
    follows_writes: bool = True


class OuterRule(Protocol):
    """The outer step."""

    def step(self, part: OuterRound, start: torch.Tensor, mean: torch.Tensor) -> None:
        """Changes outer parameters by the mean pseudo-gradient, on the training thread.

        Args:
            part: of the bucket, beside which a rule may keep vectors.
            start: the outer parameters, float32, which are the same on all ranks.
            mean: of the pseudo-gradients of all ranks, float32; may be overwritten.
        """


class Collection(Protocol):
    """How the pseudo-gradients of ranks become means: in step, or by a quorum."""

    def exchange(self, part: OuterRound, number: int) -> Iterator[Work]:
        """Begins, on the training thread, to send the pseudo-gradient of a bucket; the rest runs beside training.

        Args:
            part: of the bucket.
            number: of the round.
        """

    def means(self, part: OuterRound) -> Iterable[torch.Tensor]:
        """Yields the means by which a bucket takes its outer steps now."""


@dataclass(frozen=True)
class OuterParts:
    """What the rounds of a bucket are made of.

    Attributes:
        difference: the pseudo-gradient, in float32.
        exchange: replaces it by its mean.
        gathered: the same, if all ranks decode the payloads of all; None otherwise.
        collection: lets ranks exchange it.
        weighing: of the ranks; None where all weigh the same.
        settings: what all buckets have in common.
        agreement: of the ranks in this part of the model, by which momentum is chosen; None where it is not.
    """

    difference: Bucket
    exchange: Exchange
    gathered: GatheredMean | None
    collection: Collection
    weighing: Weighing | None
    settings: OuterSettings
    agreement: Agreement | None = None


class OuterRound(Round):
    """Takes an outer step by the mean pseudo-gradient of a bucket; see `OuterLoop` for the steps.

    Attributes:
        difference: the pseudo-gradient.
        exchange: replaces it by its mean.
        gathered: the same, if all ranks decode the payloads of all; None otherwise.
        weighing: of the ranks; None where all weigh the same.
        agreement: of the ranks, by which momentum is chosen; None where it is not.
    """

    def __init__(self, local: LocalModel, bucket: Bucket, parts: OuterParts, rule: OuterRule) -> None:
        """Begins before the first round.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            parts: what it is made of.
            rule: of the outer step.
        """
        super().__init__(local, bucket)
        self.difference, self.weighing, self.agreement = parts.difference, parts.weighing, parts.agreement
        self.exchange, self.gathered = parts.exchange, parts.gathered
        self._settings, self._rule = parts.settings, rule
        self._before: tuple[int, dict[str, Named]] = (-1, {})
        # Weakly: a quorum has these rounds, and memory is to be free when the wrapper is deleted.
        self._collection: Collection = weakref.proxy(parts.collection)

    @property
    def kind(self) -> OuterKind:
        """What its parameters have in common."""
        return kind_of(self.bucket)

    @property
    def start(self) -> torch.Tensor:
        """The outer parameters, float32, which are the same on all ranks."""
        return self.kept("start")

    def takes_part(self, number: int) -> bool:
        """See `Round.takes_part`: each fragment has rounds of its own."""
        fragments = self._settings.fragments
        return fragments == 1 or self.kind.part == number % fragments

    def restart(self) -> None:
        """See `Round.restart`; momentum and residuals stay."""
        self.start.copy_(self.bucket.flat)

    def follow(self) -> None:
        """See `Round.follow`; outer parameters follow, momentum stays, and residuals are dropped."""
        if self._settings.follows_writes:
            self.restart()
            self.forget()

    def forget(self) -> None:
        """Drops what earlier payloads have lacked."""
        self.exchange.load({})

    def run(self, number: int) -> Iterator[Work]:
        """Steps 1 and 2 of `OuterLoop`; see `Round.run`."""
        if self.local.mend is not None:
            self.remember(number)
        self.take_difference()
        if self._settings.rebases:
            self._sent.copy_(self.bucket.flat)
        return self._collection.exchange(self, number)

    def remember(self, number: int) -> None:
        """Keeps what a round changes that may be made again."""
        self._before = number, self.exchange.own_state()

    def restored(self, number: int) -> dict[str, Named] | None:
        """Returns what the exchange remembered before a round, and brings residuals elsewhere back to that.

        Returns:
            None if the bucket has not come to that round.
        """
        return self._before[1] if self._before[0] == number else None

    def take_difference(self) -> None:
        """Takes the pseudo-gradient, on the training thread."""
        # From `start` as parameters can hold it: without a step the difference is zero.
        self.difference.whole.copy_(self.start.to(self.bucket.flat.dtype)).sub_(self.bucket.flat)

    def take_result(self, number: int) -> None:
        """Step 3 of `OuterLoop`; see `Round.take_result`."""
        for mean in self._collection.means(self):
            self._rule.step(self, self.start, mean)

    def merge(self, number: int) -> None:
        """Step 4 of `OuterLoop`; see `Round.merge`."""
        flat, start = self.bucket.flat, self.start
        if self._settings.blend:
            elementwise.apply(BLENDED, [flat, start], [self._settings.blend])
        elif self._settings.rebases:
            elementwise.apply(REBASED, [flat, start, self._sent], [])
        else:
            flat.copy_(start)

    def catch_up(self, means: Iterable[torch.Tensor]) -> None:
        """Uses means of other ranks since the last round: parameters move as `start` does, and no local step is lost."""
        flat, start = self.bucket.flat, self.start
        before = start.to(flat.dtype).to(start.dtype, copy=True)
        for mean in means:
            self._rule.step(self, start, mean)
        elementwise.apply(REBASED, [flat, start, before], [])

    @property
    def _sent(self) -> torch.Tensor:
        return self.kept("sent", saved=False)

    def residual_norm(self) -> float:
        """See `Round.residual_norm`."""
        return self.exchange.residual_norm()

    def state(self) -> dict[str, Named]:
        """See `Round.state`: the residuals of the exchange."""
        return self.exchange.state()

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Round.load`."""
        self.exchange.load(state)

    def numbers(self) -> dict[str, Any]:
        """See `Round.numbers`."""
        found = {} if self.weighing is None else self.weighing.numbers()
        if self.agreement is not None and self.agreement.first == self.bucket.index:
            found = {**found, "agreement": {str(self.kind.part): self.agreement.numbers()}}
        return found

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Round.load_numbers`."""
        if self.weighing is not None:
            self.weighing.load(numbers)
        self._load_agreement(numbers)

    def load_common(self, numbers: Mapping[str, Any]) -> None:
        """Restores numbers that are the same on all ranks, so that another number of ranks has them, too."""
        self._load_agreement(common_numbers(numbers))

    def _load_agreement(self, numbers: Mapping[str, Any]) -> None:
        if self.agreement is not None and self.agreement.first == self.bucket.index:
            self.agreement.load(numbers.get("agreement", {}).get(str(self.kind.part), {}))


def common_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers of rounds without those that belong to these ranks alone: their paces, and what they have found."""
    found = {name: each for name, each in numbers.items() if name != "pace"}
    if "agreement" in found:
        found["agreement"] = {
            part: {"rounds": each["rounds"], "share": each["share"]} for part, each in found["agreement"].items()
        }
    return found
