"""The outer loop of local steps: ranks train by themselves, and meet once in many steps."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import TypedDict

import torch

from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.local_steps.in_step import InStep
from bagua_kernels.algorithms.local_steps.kind import Kind, kind_of
from bagua_kernels.algorithms.local_steps.outer_round import OuterParts, OuterRound, OuterRule, OuterSettings
from bagua_kernels.algorithms.local_steps.outer_rounds import Moments, OuterRounds
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.local_steps.paced import PacedPlan
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.quorum import Quorum
from bagua_kernels.algorithms.local_steps.quorum_merges import check_quorum, only_codec
from bagua_kernels.algorithms.local_steps.weighing import Weighing
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.round_algorithm import RoundAlgorithm
from bagua_kernels.algorithms.models.rounds import RoundsOptions
from bagua_kernels.algorithms.policy.schedule import Assignment, Encoding, Scheduled
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator


class LoopOptions(TypedDict, total=False):
    """Keyword arguments of `OuterLoop` that all algorithms have."""

    exact: str | tuple[str, ...] | list[str]
    delay: int
    blend: float | None
    sync_state: tuple[int, int] | None
    by_speed: bool
    quorum: int | None
    grace: float
    communicator: Communicator | None
    bucket_bytes: int
    average_states: bool


class DenseOptions(LoopOptions, total=False):
    """Keyword arguments of algorithms that send each element."""

    owner_feedback: bool | None
    min_numel: int
    seed: int
    penalty: Penalty | None


class OuterOptions(DenseOptions, total=False):
    """Keyword arguments of `OuterLoop` beside its interval."""

    codec: Encoding
    error_feedback: bool | None


class OuterLoop(RoundAlgorithm):
    """Base of the algorithms that take many steps alone, and then one together (DiLoCo, Douillard et al., 2023).

    All ranks have the same outer parameters, `start`, in float32. After each `interval` optimizer's steps:

    1. The pseudo-gradient of a rank is d = start - x, where `start` is rounded to the parameters' dtype first.
    2. The ranks average it, by a codec or as it is, while training goes on for `delay` steps.
    3. The outer step changes `start` by the mean. It is the same on all ranks, bit for bit.
    4. The parameters become x = start + (what the rank has learned since step 1), or a blend of `start` and x.

    A step counts if the optimizer has taken it: neither a batch whose gradients are accumulated nor a step that a `GradScaler`
    leaves out. Optimizer states stay local, and are kept across rounds. One rank alone meets nobody, and takes part in outer
    steps if these change anything.

    With `by_speed` a rank of half the speed takes half as many steps, and has half the weight in step 2: nobody waits for it.
    `RoundSampler` deals the data accordingly.

    With `quorum` a rank waits for the training of no more ranks than that, and goes on without those that are lost (Decoupled
    DiLoCo, 2026). In place of step 2:

    - Ranks post their pseudo-gradients to all others, with the weight samples^2 / steps.
    - As soon as `quorum` ranks have, and `grace` seconds later at most, all ranks take the mean of what has been posted. What is
      posted later counts in the next mean.
    - A rank waits until there is a mean since its last round. If it is late there may be several: it takes an outer step by each.
    - Collective calls wait for all ranks that are left, which meanwhile train on. There a rank that has few steps is waited for.

    Attributes:
        delay: optimizer's steps from the beginning of an exchange to the use of its result.
        blend: the share of x in step 4; None for the sum.
        quorum: ranks whose pseudo-gradients are enough for a step; None for all.
        grace: seconds for which a quorum waits for further ranks.
        fragments: the number of rounds in which each parameter is exchanged once.
        weighs: False if all ranks have the same weight, whatever their numbers of samples.
        takes_quorum: True if an outer step needs no more of other ranks than their mean.
    """

    fragments = 1
    weighs = True
    takes_quorum = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        codec: Encoding = None,
        error_feedback: bool | None = None,
        owner_feedback: bool | None = None,
        exact: str | tuple[str, ...] | list[str] = "1d",
        min_numel: int = 512,
        seed: int = 0,
        delay: int = 0,
        blend: float | None = None,
        sync_state: tuple[int, int] | None = None,
        penalty: Penalty | None = None,
        by_speed: bool = False,
        quorum: int | None = None,
        grace: float = 0.0,
        communicator: Communicator | None = None,
        bucket_bytes: int = 10 << 20,
        average_states: bool = False,
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            interval: optimizer's steps from one round to the next.
            codec: of pseudo-gradients: a codec, its spec, or codecs by the round from which on they are used. None: float32.
            error_feedback: True if each rank keeps what its payloads lack; by default if the codec is biased.
            owner_feedback: True if the owners of chunks do; by default as `error_feedback`.
            exact: patterns of names of parameters that no codec encodes; "1d" for all biases and norms.
            min_numel: parameters with fewer elements are exact too.
            seed: of random numbers.
            delay: optimizer's steps, less than `interval`, that an exchange may take beside training.
            blend: from 0 to 1: the share of a rank's own parameters when a result is used. None: the rank's parameters are
                moved by what the outer step has changed, so that no local step is lost.
            sync_state: how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al., 2025): (3, 6)
                stands for each third and each sixth exchange of all parameters. None: they stay local.
            penalty: for pseudo-gradients with large norms; None for none.
            by_speed: True if ranks take steps in proportion to their speeds, of which `interval` is the mean then.
            quorum: ranks whose pseudo-gradients are enough for an outer step; None for all.
            grace: seconds for which a quorum waits for further ranks.
            communicator: as for `Algorithm`.
            bucket_bytes: as for `ModelAlgorithm`.
            average_states: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`, or a value that should be a codec is not one.
            ValueError: a number does not fit, or as for `ModelAlgorithm`.
        """
        if not 0 <= delay < max(interval, 1):
            raise ValueError(f"delay must be from 0 to interval - 1, got {delay=} and {interval=}")
        if blend is not None and not 0 <= blend <= 1:
            raise ValueError(f"blend must be from 0 to 1, or None, got {blend=}")
        if sync_state is not None and (len(sync_state) != 2 or min(sync_state) < 1):
            raise ValueError(f"sync_state must be two numbers of rounds, each at least 1, or None, got {sync_state=}")
        refused = {"by_speed": by_speed, "penalty": penalty is not None, "sync_state": sync_state is not None}
        check_quorum(quorum, grace, refused)
        if quorum is not None and not self.takes_quorum:
            raise ValueError(f"{type(self).__name__} needs all ranks in step, got {quorum=}: use DiLoCo instead")
        self.delay, self.blend = delay, blend
        self.assignment = Assignment.make(codec, 0, None, exact, min_numel)
        self.feedback = Feedback(error_feedback, owner_feedback, seed)
        self.sync_state, self.penalty, self.by_speed = sync_state, penalty, by_speed
        self.quorum, self.grace = quorum, grace
        self._policy = Scheduled(self.assignment.last_start)
        self._lane: Communicator | None = None
        self._collection: InStep | Quorum | None = None
        self._pace: Pace | None = None
        self._warned: set[str] = set()
        super().__init__(
            module,
            optimizer,
            interval=interval,
            communicator=communicator,
            bucket_bytes=bucket_bytes,
            average_states=average_states,
        )

    @abc.abstractmethod
    def rule(self) -> OuterRule:
        """Returns the outer step."""

    def part(self, name: str, parameter: torch.Tensor) -> int:
        """Returns the number of the part of the model to which a parameter belongs; a bucket has parameters of one part."""
        return 0

    def kind(self, name: str, parameter: torch.Tensor) -> Kind:
        """See `ModelAlgorithm.kind`: what no codec encodes lies in buckets of its own."""
        schedule, exact = self.assignment.place(name, parameter)
        return Kind(self.part(name, parameter), None if exact or not schedule.codecs else schedule)

    def alignment_of(self, kind: Kind) -> int:
        """See `ModelAlgorithm.alignment_of`: whole blocks of the codecs that encode the kind."""
        return 1 if kind.schedule is None else max(codec.block for codec in kind.schedule.codecs)

    @property
    def follows_writes(self) -> bool:
        """True if outer parameters must become what parameters were written to, since they would be moved away from there."""
        return True

    def plan(self) -> Plan:
        """Returns which steps have a round."""
        return Plan(self.interval) if self._pace is None else PacedPlan(self._pace, self.interval)

    def loop_for(self, local: LocalModel) -> OuterRounds:
        """See `ModelAlgorithm.loop_for`."""
        self._lane = local.communicator.duplicate()
        local.opened.append(self._lane)
        if self.by_speed:
            self._pace = Pace(self.interval, self._lane.rank, self._lane.size, least=self.delay + 1)
        options = RoundsOptions(
            # Residuals and two passes take several collectives.
            several=True,
            delay=self.delay,
            # Steps that are left out do not count here.
            cure_of_lateness="with fewer batches on some ranks, train within join()",
            compares_writes=self.follows_writes,
        )
        moments = None if self.sync_state is None else Moments(self._lane, self.sync_state, self.fragments)
        if self.quorum is None:
            self._collection = in_step = InStep(local, self.interval, self._pace, self.weighs)
            rounds = [self.round_for(local, bucket) for bucket in local.flat.buckets]
            self.rounds = made = OuterRounds(local, rounds, self.plan(), options, in_step, moments)
            return made
        needs_all = frozenset({"consensus()", *(["synchronize()"] if self.average_states else [])})
        self._collection = quorum = Quorum(local, self.quorum, self.grace, self.weighs, needs_all)
        rounds = [self.round_for(local, bucket) for bucket in local.flat.buckets]
        quorum.open(rounds).courier.end_with(self)
        self.rounds = made = OuterRounds(local, rounds, self.plan(), options, quorum, moments)
        return made

    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        """See `RoundAlgorithm.round_for`."""
        return OuterRound(local, bucket, self.parts_for(bucket), self.rule())

    @property
    def lane(self) -> Communicator:
        """The communicator of the exchanges, which are made beside training."""
        assert self._lane is not None
        return self._lane

    def parts_for(self, bucket: Bucket, gathered: GatheredMean | None = None) -> OuterParts:
        """Returns what the rounds of a bucket are made of; called for each bucket, in the same order on all ranks.

        Args:
            bucket: of the parameters.
            gathered: replaces the pseudo-gradient by its mean; None for what suits the codec.
        """
        assert self._collection is not None
        difference, lane = pseudo_gradient(bucket) if gathered is None else gathered.bucket, self.lane
        if gathered is None and self.quorum is not None:
            # Ranks of a quorum decode what they have received.
            gathered = GatheredMean(difference, lane, only_codec(kind_of(bucket).schedule), self.feedback)
        exchange: Exchange
        if gathered is not None:
            exchange = gathered
        elif difference.kind is None:
            exchange = Mean(difference, lane)
        else:
            exchange = CompressedExchange(difference, lane, self._policy, self.feedback)
        weighing = None
        if lane.size > 1 and (self.by_speed or self.penalty is not None):
            weighing = Weighing(lane, bucket.index, self.penalty, self._pace, self._warned)
        settings = OuterSettings(self.fragments, self.blend, self.delay > 0 and self.blend is None, self.follows_writes)
        return OuterParts(difference, exchange, gathered, self._collection, weighing, settings)

    @property
    def ranks(self) -> Communicator:
        """The communicator of all ranks, for calls to which all come."""
        return self._communicator

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
        if self._collection is not None:
            self._collection.samples += samples

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


def pseudo_gradient(bucket: Bucket) -> Bucket:
    """Returns a bucket for the pseudo-gradients of one of parameters; its kind is the schedule of codecs that encode them."""
    # Sums of pseudo-gradients are not to be rounded as parameters are.
    dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
    views = [view.to(dtype) for view in bucket.views]
    return Bucket(views, align=bucket.align, index=bucket.index, kind=kind_of(bucket).schedule, names=bucket.names)
