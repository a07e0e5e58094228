"""The outer loop of local steps: ranks train by themselves, and meet once in many steps."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypedDict

import torch

from bagua_kernels.algorithms.engine.healing import states_of_ranks
from bagua_kernels.algorithms.exchanges.compressed import Feedback
from bagua_kernels.algorithms.local_steps.in_step import InStep
from bagua_kernels.algorithms.local_steps.kind import OuterKind
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound, OuterSettings, common_numbers
from bagua_kernels.algorithms.local_steps.outer_rounds import Moments, OuterRounds
from bagua_kernels.algorithms.local_steps.outer_setup import AT_ONCE, OuterSetup, Turns, Weights
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.local_steps.paced import PacedPlan
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.quorum import Quorum
from bagua_kernels.algorithms.local_steps.quorum_merges import check_quorum
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.loop import Loop
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.rounds import RoundsOptions
from bagua_kernels.algorithms.models.writes import digest
from bagua_kernels.algorithms.policy.schedule import Assignment, Encoding
from bagua_kernels.algorithms.wrapping.verification import compare
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Nodes
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.comm.mailbox.courier import weakly

# What is kept of each bucket and is the same on all ranks.
COMMON = ("start", "outer_momentum", "slow_momentum")


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
    hierarchical: bool | None
    nodes: Nodes | Iterable[Iterable[int]] | None
    bucket_bytes: int
    average_states: bool
    verify_every: int | None
    on_failure: str


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
        begins_in_node: True if in two tiers a round begins with a wait for the ranks of this node.
        fragments: the number of rounds in which each parameter is exchanged once.
        weighs: False if all ranks have the same weight, whatever their numbers of samples.
        takes_quorum: True if an outer step needs no more of other ranks than their mean.
        plain_means: True if the outer step makes the parameters the mean of all ranks'.
        first_phase: the number of first steps that have a round each.
        follows_agreement: True if outer steps follow how far ranks agree.
        parts: the parts of the model to which parameters belong, by name; 0 for others. A bucket has parameters of one part.
        setup: what rounds are made with, on several ranks.
    """

    heals_by_mean = False
    refuses_verification = ""
    takes_drafts = supplies = True
    begins_in_node = False
    fragments = 1
    weighs = True
    takes_quorum = True
    plain_means = False
    first_phase = 0
    follows_agreement = False
    parts: Mapping[str, int] = MappingProxyType({})
    setup: OuterSetup

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
        hierarchical: bool | None = None,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        bucket_bytes: int = 10 << 20,
        average_states: bool = False,
        verify_every: int | None = None,
        on_failure: str = "raise",
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
            sync_state: how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al., 2025). (3, 6)
                stands for each third and each sixth exchange of all parameters. None: they stay local.
            penalty: a `Penalty` for pseudo-gradients with large norms; None for none.
            by_speed: True if ranks take steps in proportion to their speeds, of which `interval` is the mean then.
            quorum: ranks whose pseudo-gradients are enough for an outer step; None for all.
            grace: seconds for which a quorum waits for further ranks.
            communicator: as for `Algorithm`.
            hierarchical: as for `Algorithm`.
            nodes: as for `Algorithm`.
            bucket_bytes: as for `ModelAlgorithm`.
            average_states: as for `ModelAlgorithm`.
            verify_every: as for `Algorithm`, at the first round after so many steps.
            on_failure: as for `Algorithm`.

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
        if quorum is not None:
            self.refuses_tiers = "with a quorum each rank posts to all others, and waits for none of its node"
            self.refuses_verification = "with a quorum ranks have outer parameters of different rounds"
        self.delay, self.blend = delay, blend
        self.assignment = Assignment.make(codec, 0, None, exact, min_numel)
        self.feedback = Feedback(error_feedback, owner_feedback, seed)
        self.sync_state, self.penalty, self.by_speed = sync_state, penalty, by_speed
        self.quorum, self.grace = quorum, grace
        self._plan, self._agreed_plan = Plan(interval), None
        self._own_steps: int | None = None
        if quorum is not None:
            # Ranks have no common moment between two rounds.
            self.takes_drafts = self.supplies = False
        super().__init__(
            module,
            optimizer,
            interval=interval,
            communicator=communicator,
            hierarchical=hierarchical,
            nodes=nodes,
            bucket_bytes=bucket_bytes,
            average_states=average_states,
            verify_every=verify_every,
            on_failure=on_failure,
        )

    def _report(self) -> Any:
        """See `Algorithm._report`; with what is in place, a digest of what all ranks have alike, and what that has counted."""
        steps, unfinished, _ = super()._report()
        rounds = self.rounds
        if rounds is None:
            return [steps, unfinished, None]
        assert isinstance(rounds, OuterRounds)
        plan = self._plan.report(steps, None if unfinished is None else rounds.number)
        common = [rounds.progress, digest(self._common()), self.is_behind, plan, rounds.counted()]
        return [steps, unfinished, common]

    def _boundary(self) -> int:
        """See `Algorithm._boundary`: rounds whose results are in place."""
        return 0 if self.rounds is None else self.rounds.finished

    @torch.no_grad()
    def _supply_after_round(self, rounds: int) -> None:
        """Lets members that are behind come nearer between two rounds; collective.

        What a rank has learned since its outer parameters stays: its own parameters follow these.

        Args:
            rounds: whose results are in place.
        """
        if not self.is_behind:
            self._advance_supply(rounds)
            return
        flat, keeps = self.local.flat, self.local.has_to_keep()
        before = [flat.kept(bucket, "start").clone() for bucket in flat.buckets]
        self._advance_supply(rounds)
        for bucket, earlier in zip(flat.buckets, before, strict=True):
            bucket.flat.add_(flat.kept(bucket, "start") - earlier)
        if not keeps:
            self.local.mark()

    def _tensors_alike(self) -> list[list[torch.Tensor]]:
        """See `Algorithm._tensors_alike`: outer parameters and momentum of each bucket."""
        flat, found = self.local.flat, dict[int, list[torch.Tensor]]()
        for index, key in self._names_of_common():
            found.setdefault(index, []).append(flat.kept(flat.buckets[index], key))
        return list(found.values())

    def _is_between_rounds(self) -> bool:
        """See `Algorithm._is_between_rounds`."""
        rounds, steps = self.rounds, self.local.steps
        return rounds is None or steps == 0 or rounds.plan.round_at(steps - 1) is not None

    def _common(self) -> list[torch.Tensor]:
        """The vectors that are the same on all ranks: outer parameters and momentum."""
        flat = self.local.flat
        return [flat.kept(flat.buckets[index], key) for index, key in self._names_of_common()]

    def _names_of_common(self) -> list[tuple[int, str]]:
        """For each of these vectors the index of its bucket, and its key."""
        flat = self.local.flat
        return [(bucket.index, key) for bucket in flat.buckets for key in COMMON if flat.keeps(bucket, key)]

    def _reconcile(self, loop: Loop, reports: Mapping[int, Any], old: Communicator) -> Any:
        """See `ModelAlgorithm._reconcile`: ranks keep their own parameters, outer parameters, momentum and residuals.

        1. Where the last round is in place on some ranks only, the others take it over from one of these.
        2. Where it is in place nowhere, residuals are again what they were before it.

        With a quorum ranks have used different numbers of merges. What was posted and is in none of those that the furthest rank
        has used stays in parameters, and will be posted again.
        """
        assert isinstance(loop, OuterRounds)
        assert self.members is not None
        # What those that are behind have is near that of the others, and will be given to them.
        whole = {rank: tuple(told[:2]) for rank, (_, _, told) in reports.items() if not told[2]}
        last, numbers = max(told[0] for told in whole.values()), _numbers_of_all(loop)
        self._agreed_plan = self._plan.agreed(
            {rank: told[3] for rank, (_, _, told) in reports.items()}, self.communicator.size
        )
        source = min(rank for rank, told in whole.items() if told[0] == last)
        counted = reports[source][2][4]
        exchanges = [each.exchange for each in loop.outer]
        before = {}
        for each in [] if loop.unfinished is None else loop.outer:
            restored = each.restored(loop.number)
            if restored is not None and not loop.is_counted(each, last, counted):
                before[each.exchange] = restored
        state = states_of_ranks(exchanges, old, before, self.members)
        if len({*whole.values()}) > 1:
            root, flat = sorted(reports).index(source), self.local.flat
            earlier = {each: each.start.clone() for each in loop.outer if self.quorum is not None}
            # Before the first round is in place on a rank, it has no momentum yet.
            for index, key in old.broadcast_object(self._names_of_common(), root):
                old.broadcast(flat.kept(flat.buckets[index], key), root).wait()
            for each in loop.outer:
                if loop.is_counted(each, last, counted):
                    each.bucket.flat.copy_(each.start)
                elif self.quorum is not None:
                    each.bucket.flat.add_(each.start - earlier[each])
        own, lost, _ = reports[self.communicator.rank]
        self._own_steps = own if lost is None else lost
        return state, numbers

    def _take_up(self, loop: Loop, state: Any) -> None:
        """See `ModelAlgorithm._take_up`."""
        assert isinstance(loop, OuterRounds)
        exchanges, numbers = state
        for each in loop.outer:
            each.load(exchanges)
        loop.load_numbers(numbers)

    def _common_state(self, loop: Loop) -> Any:
        """See `ModelAlgorithm._common_state`: outer parameters, momentum, and residuals of chunks' owners."""
        assert isinstance(loop, OuterRounds)
        names, vectors = self._names_of_common(), None if self._gives_nearly else self._common()
        own = [each.exchange.state().get("owner", {}) for each in loop.outer]
        owners = {name: vector for named in own for name, vector in named.items()}
        numbers = _numbers_of_all(loop)
        numbers.pop("samples", None)
        return [names, vectors, owners, numbers]

    def _take_common(self, loop: Loop, state: Any) -> None:
        """See `ModelAlgorithm._take_common`; its own parameters are the outer ones.

        Those of a draft stay. Momentum is zero then, until it is given.
        """
        assert isinstance(loop, OuterRounds)
        names, vectors, owners, numbers = state
        flat = self.local.flat
        kept = [flat.kept(flat.buckets[index], key) for index, key in names]
        for own, vector in [] if vectors is None else zip(kept, vectors, strict=True):
            own.copy_(vector)
        for bucket in [] if vectors is None else flat.buckets:
            bucket.flat.copy_(flat.kept(bucket, "start"))
        for each in loop.outer:
            each.load({"owner": owners} if owners else {})
        loop.load_numbers(numbers)

    def _is_to_change(self) -> bool:
        """See `ModelAlgorithm._is_to_change`; a rank that has few rounds is not to be waited for until its next one."""
        is_ending = self.quorum is not None and self.members is not None and self.members.has_changed
        return is_ending or super()._is_to_change()

    def _align(self, steps: int) -> None:
        """See `ModelAlgorithm._align`; ranks of a quorum have rounds of their own."""
        own, self._own_steps = self._own_steps, None
        super()._align(steps if self.quorum is None or own is None else own)

    def _give_loop(self, loop: Loop, steps: int) -> None:
        """See `ModelAlgorithm._give_loop`; with the steps of each rank to the next round."""
        super()._give_loop(loop, steps)
        agreed, self._agreed_plan = self._give(self._agreed_plan), None
        if agreed is not None:
            assert isinstance(loop, OuterRounds)
            loop.take_rounds(self._plan.go_on(self.local.steps, agreed))

    @abc.abstractmethod
    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        """See `RoundAlgorithm.round_for`; `self.setup.parts_for(bucket)` is what it is made of, beside the outer step."""

    def kind(self, name: str, parameter: torch.Tensor) -> OuterKind:
        """See `ModelAlgorithm.kind`: what no codec encodes lies in buckets of its own."""
        schedule, exact = self.assignment.place(name, parameter)
        return OuterKind.of(self.parts.get(name, 0), None if exact or not schedule.codecs else schedule)

    def loop_for(self, local: LocalModel) -> OuterRounds:
        """See `RoundAlgorithm.loop_for`."""
        communicator = local.connect()
        pace = (
            Pace(self.interval, communicator.rank, communicator.size, least=self.delay + 1, waited=local.wait_seconds)
            if self.by_speed
            else None
        )
        self._plan = Plan(self.interval, self.first_phase) if pace is None else PacedPlan(pace, self.interval)
        # Plain means of parameters do not depend on `start`.
        follows = not self.plain_means or bool(self.assignment.default.codecs) or self.penalty is not None
        # Training waits for the round anyway, bucket by bucket then. A quorum's posts are merged all together.
        one_by_one = self.delay == 0 and self.quorum is None
        rebases = self.delay > 0 and self.blend is None
        settings = OuterSettings(self.fragments, self.blend, rebases, follows)
        collection: InStep | Quorum
        if self.quorum is None:
            collection = InStep(local, self._plan, self.weighs)
        else:
            needs_all = frozenset({"consensus()", *(["synchronize()"] if self.average_states else [])})
            # Of fewer ranks all are enough.
            count = self.quorum if self.members is None else min(self.quorum, communicator.size)
            collection = Quorum(local, count, self.grace, self.weighs, needs_all)
        weights = Weights(communicator, self.penalty, pace)
        self.setup = OuterSetup(
            communicator,
            collection,
            weights,
            settings,
            self.assignment,
            self.feedback,
            self.quorum is not None,
            Turns(local.flat.buckets, self.fragments) if one_by_one else None,
            {} if self.follows_agreement and self.quorum is None else None,
        )
        rounds = [self.round_for(local, bucket) for bucket in local.flat.buckets]
        if isinstance(collection, Quorum):
            collection.open(rounds).courier.end_with(self)
        options = RoundsOptions(
            # Residuals and two passes take several collectives.
            several=True,
            announces=self.begins_in_node and isinstance(communicator, TieredCommunicator),
            delay=self.delay,
            # Steps that are left out do not count here.
            cure_of_lateness="with fewer batches on some ranks, train within join()",
            compares_writes=follows,
            at_once=AT_ONCE if one_by_one else None,
        )
        moments = None if self.sync_state is None else Moments(communicator, self.sync_state, self.fragments)
        self.rounds = made = OuterRounds(local, rounds, self._plan, options, collection, moments)
        self._watch(made)
        if self.members is not None:
            made.placed, made.is_met = weakly(self._supply_after_round), weakly(self._is_supplying)
        return made

    @torch.no_grad()
    def _compare(self, steps: int) -> None:
        """See `RoundAlgorithm._compare`: outer parameters."""
        found = {
            name: self.local.flat.kept(bucket, "start")[span]
            for bucket in self.local.flat.buckets
            for name, span in zip(bucket.names, bucket.own, strict=True)
        }
        for work in compare(self.communicator, found, "outer parameters", steps, counts=not self.is_behind):
            work.wait()

    @property
    def steps_of_ranks(self) -> list[int]:
        """The steps that each rank takes in the round under way."""
        return self._plan.steps_of(self.communicator.size)

    @property
    def steps_left(self) -> list[int]:
        """The steps that each rank has still to take in the round under way, just after ranks have become others."""
        return self._plan.left(self.local.steps, self.communicator.size)

    def count_samples(self, samples: float) -> None:
        """Adds to this rank's samples in the round under way; without it each step counts as one.

        Call it for each batch on all ranks, where batches differ in size.

        Args:
            samples: of a batch.
        """
        if self.rounds is not None:
            self.setup.collection.samples += samples

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


def _numbers_of_all(loop: OuterRounds) -> dict[str, Any]:
    """Returns numbers of a loop that others go on with: those of its ranks' steps are of these ranks alone."""
    return common_numbers(loop.numbers())
