"""The outer loop of local steps: ranks train by themselves, and meet once in many steps."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch

from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.exchanges.vectors import Named, mean_of
from bagua_kernels.algorithms.local_steps.kind import Kind, kind_of
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.quorum_merges import only_codec
from bagua_kernels.algorithms.local_steps.quorum_rounds import QuorumRounds
from bagua_kernels.algorithms.policy.schedule import Assignment, Encoding, Scheduled
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Work
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import BLENDED, REBASED


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


class OuterLoop(QuorumRounds):
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
    """

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
        self.delay, self.blend = delay, blend
        self._rebases = delay > 0 and blend is None
        self.assignment = Assignment.make(codec, 0, None, exact, min_numel)
        self.feedback = Feedback(error_feedback, owner_feedback, seed)
        self._policy = Scheduled(self.assignment.last_start)
        self._differences: list[Bucket] = []
        self._exchanges: list[Exchange] = []
        super().__init__(
            module,
            optimizer,
            sync_state=sync_state,
            penalty=penalty,
            by_speed=by_speed,
            quorum=quorum,
            grace=grace,
            interval=interval,
            communicator=communicator,
            bucket_bytes=bucket_bytes,
            average_states=average_states,
        )

    @abc.abstractmethod
    def outer_step(self, bucket: Bucket, start: torch.Tensor, mean: torch.Tensor, turn: int) -> None:
        """Changes `start` by the mean pseudo-gradient, on the training thread.

        Args:
            bucket: of the parameters.
            start: the outer parameters, float32, of as many elements as `bucket.flat`.
            mean: of the pseudo-gradients of all ranks, float32.
            turn: number of the round, from 0.
        """

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

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        for bucket in self.flat.buckets:
            # Sums of pseudo-gradients are not to be rounded as parameters are.
            dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
            difference = Bucket(
                [view.to(dtype) for view in bucket.views],
                align=bucket.align,
                index=bucket.index,
                kind=kind_of(bucket).schedule,
                names=bucket.names,
            )
            self._differences.append(difference)
            self._exchanges.append(self.exchange_for(difference, self.rounds))
        self.open_quorum(mailbox, self._exchanges)

    def exchange_for(self, difference: Bucket, communicator: Communicator) -> Exchange:
        """Returns what replaces a bucket of pseudo-gradients by their mean; a `GatheredMean` for a quorum."""
        if self.quorum is not None:
            codec = only_codec(kind_of(self.flat.buckets[difference.index]).schedule)
            return GatheredMean(difference, communicator, codec, self.feedback)
        if difference.kind is None:
            return Mean(difference, communicator)
        return CompressedExchange(difference, communicator, self._policy, self.feedback)

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`; momentum and residuals stay."""
        for bucket in self.flat.buckets:
            self.start(bucket).copy_(bucket.flat)

    @property
    def follows_writes(self) -> bool:
        """True if outer parameters must become what parameters were written to, since they would be moved away from there."""
        return True

    @property
    def compares_writes(self) -> bool:
        """See `RoundAlgorithm.compares_writes`."""
        return self.follows_writes

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `ModelAlgorithm.take_written`; outer parameters follow, momentum stays, and residuals are dropped.

        Raises:
            RuntimeError: with a quorum, after the first round.
        """
        super().take_written(values)
        if not self.follows_writes:
            return
        if self.quorum is not None and self.rounds_begun:
            raise RuntimeError(
                f"parameters were written after the first round of a {type(self).__name__} with a quorum, whose ranks have no "
                "common moment for it: write them before, or wrap the module anew"
            )
        self.restart()
        self.forget()
        self.tell_written()

    def forget(self) -> None:
        """Drops what earlier payloads have lacked."""
        for exchange in self._exchanges:
            exchange.load({})

    def start(self, bucket: Bucket) -> torch.Tensor:
        """Returns the outer parameters of a bucket, float32, which are the same on all ranks."""
        return self.flat.kept(bucket, "start")

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        difference = self._differences[bucket.index]
        self.take_difference(bucket, difference)
        if self._rebases:
            self._sent(bucket).copy_(bucket.flat)
        if self.quorum is None:
            return self.weighed(difference, self._exchanges[bucket.index].run(turn))
        self.post(bucket, turn)
        return iter(())

    @property
    def has_own(self) -> bool:
        """See `ModelAlgorithm.has_own`: not behind a round of all ranks whose result is in place everywhere."""
        turn = self.turn_at(self._steps - 1) if self._steps and not self._under_way else None
        whole = not self.delay and self.quorum is None
        return super().has_own and not (
            turn is not None and whole and len(self.buckets_of(turn)) == len(self.flat.buckets)
        )

    def take_difference(self, bucket: Bucket, difference: Bucket) -> None:
        """Takes a bucket's pseudo-gradient, on the training thread.

        Args:
            bucket: of the parameters.
            difference: for the pseudo-gradient, in float32.
        """
        # From `start` as parameters can hold it: without a step the difference is zero.
        difference.flat.copy_(self.start(bucket).to(bucket.flat.dtype)).sub_(bucket.flat)

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        start, own = self.start(bucket), (turn, self._differences[bucket.index].flat)
        for number, mean in [own] if self.quorum is None else self.merged(bucket):
            self.outer_step(bucket, start, mean, number)
        if self.blend:
            elementwise.apply(BLENDED, [bucket.flat, start], [self.blend])
        elif self._rebases:
            elementwise.apply(REBASED, [bucket.flat, start, self._sent(bucket)], [])
        else:
            bucket.flat.copy_(start)

    def _sent(self, bucket: Bucket) -> torch.Tensor:
        return self.flat.kept(bucket, "sent", saved=False)

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        return math.hypot(*(each.residual_norm() for each in self._exchanges))

    def vectors(self) -> dict[str, dict[str, torch.Tensor]]:
        """See `ModelAlgorithm.vectors`: with the residuals of the exchanges."""
        state = super().vectors()
        for exchange in self._exchanges:
            for key, named in exchange.state().items():
                state.setdefault(key, {}).update(named)
        return state

    def load_vectors(self, states: list[Mapping[str, Any]]) -> None:
        """See `ModelAlgorithm.load_vectors`. Outer parameters and momentum are the same on all ranks, and any number of them."""
        mean = mean_of([state["vectors"] for state in states])
        residuals: dict[str, Named] = {key: mean.pop(key) for key in ("worker", "owner") if key in mean}
        # One rank alone may have had none: then they are the parameters, as `restart` has set them.
        mean.setdefault("start", self.flat.state().get("start", {}))
        self.flat.load(mean)
        for exchange in self._exchanges:
            exchange.load(residuals)
        self.load_quorum(states[0]["numbers"])
