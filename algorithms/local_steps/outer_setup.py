"""What the rounds of an outer loop are made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.local_steps.agreement import Agreement
from bagua_kernels.algorithms.local_steps.in_step import InStep
from bagua_kernels.algorithms.local_steps.kind import kind_of
from bagua_kernels.algorithms.local_steps.outer_round import OuterParts, OuterSettings
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.quorum import Quorum
from bagua_kernels.algorithms.local_steps.quorum_merges import only_codec
from bagua_kernels.algorithms.local_steps.weighing import Weighing
from bagua_kernels.algorithms.policy.schedule import Assignment, Scheduled
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator

AT_ONCE = 2  # buckets: one is exchanged while the next one is prepared, or the last one is put in place


@dataclass(frozen=True)
class Weights:
    """How ranks are weighed.

    Attributes:
        communicator: of the exchanges.
        penalty: for norms of pseudo-gradients; None for none.
        pace: of ranks that take different numbers of steps; None if all take as many.
        warned: of what there was a warning, in any bucket.
    """

    communicator: Communicator
    penalty: Penalty | None
    pace: Pace | None
    warned: set[str] = field(default_factory=set)

    def weighing(self, index: int) -> Weighing | None:
        """Returns what weighs the ranks in a bucket; None where all weigh the same."""
        if self.communicator.size == 1 or (self.penalty is None and self.pace is None):
            return None
        return Weighing(self.communicator, index, self.penalty, self.pace, self.warned)


class Turns:
    """Memory for the pseudo-gradients of as many buckets as are under way at a time.

    The buckets of a round take it in turn. A bucket has the memory of the one `AT_ONCE` places before it in the same round.
    """

    def __init__(self, buckets: Sequence[Bucket], fragments: int) -> None:
        """Makes the memory.

        Args:
            buckets: of parameters, in the order of the exchanges.
            fragments: the number of rounds in which each parameter is exchanged once; one has the buckets of one part then.
        """
        self._places: dict[Bucket, tuple[int, torch.dtype]] = {}
        counts, sizes, devices = Counter[int](), dict[tuple[int, torch.dtype], int](), {b.flat.device for b in buckets}
        for bucket in buckets:
            part = kind_of(bucket).part if fragments > 1 else 0
            turn, dtype = counts[part] % AT_ONCE, _wide(bucket.flat.dtype)
            counts[part] += 1
            key = self._places[bucket] = turn, dtype
            sizes[key] = max(sizes.get(key, 0), bucket.flat.numel())
        self._memory = {
            key: torch.zeros(size, dtype=key[1], device=device) for device in devices for key, size in sizes.items()
        }

    def place(self, bucket: Bucket, difference: Bucket) -> None:
        """Moves the pseudo-gradient of a bucket to its memory."""
        difference.move_to(self._memory[self._places[bucket]])


@dataclass(frozen=True)
class OuterSetup:
    """What the rounds of all buckets are made with.

    Attributes:
        communicator: the communicator of the exchanges, which are made beside training.
        collection: of pseudo-gradients.
        weights: of the ranks.
        settings: what all buckets have in common.
        assignment: of codecs.
        feedback: of the codecs.
        decodes_all: True if each rank decodes the payloads of all, as a quorum needs it.
        turns: the memory of pseudo-gradients that are exchanged in turn; None if each has its own.
        agreements: of each part of the model that has buckets; None where nothing follows how far ranks agree.
    """

    communicator: Communicator
    collection: InStep | Quorum
    weights: Weights
    settings: OuterSettings
    assignment: Assignment
    feedback: Feedback
    decodes_all: bool
    turns: Turns | None = None
    agreements: dict[int, Agreement] | None = None

    def parts_for(self, bucket: Bucket, gathered: GatheredMean | None = None) -> OuterParts:
        """Returns what the rounds of a bucket are made of; called for each bucket, in the same order on all ranks.

        Args:
            bucket: of the parameters.
            gathered: replaces the pseudo-gradient by its mean; None for what suits the codec.
        """
        difference = pseudo_gradient(bucket) if gathered is None else gathered.bucket
        if gathered is None and self.decodes_all:
            gathered = GatheredMean(difference, self.communicator, only_codec(kind_of(bucket).schedule), self.feedback)
        exchange: Exchange
        if gathered is not None:
            exchange = gathered
        elif difference.kind is None:
            exchange = Mean(difference, self.communicator)
        else:
            exchange = CompressedExchange(
                difference, self.communicator, Scheduled(self.assignment.last_start), self.feedback
            )
        if self.turns is not None:
            self.turns.place(bucket, difference)
        weighing = self.weights.weighing(bucket.index)
        agreement = self._agreement_for(bucket)
        return OuterParts(difference, exchange, gathered, self.collection, weighing, self.settings, agreement)

    def _agreement_for(self, bucket: Bucket) -> Agreement | None:
        """Returns that of the bucket's part of the model, whose first bucket begins its rounds."""
        if self.agreements is None:
            return None
        part = kind_of(bucket).part
        if part not in self.agreements:
            self.agreements[part] = Agreement(self.communicator, bucket.index)
        return self.agreements[part]


def pseudo_gradient(bucket: Bucket) -> Bucket:
    """Returns a bucket for the pseudo-gradients of one of parameters; its kind is the schedule of codecs that encode them."""
    # Sums of pseudo-gradients are not to be rounded as parameters are.
    views = [view.to(_wide(bucket.flat.dtype)) for view in bucket.views]
    return Bucket(views, align=bucket.align, index=bucket.index, kind=kind_of(bucket).schedule, names=bucket.names)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
