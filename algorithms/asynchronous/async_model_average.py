"""Averages of all ranks beside training, at times of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.asynchronous.averages import Averages
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.engine.member import Member
from bagua_kernels.algorithms.engine.options import BucketOptions, EngineOptions
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import ModelOptions
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.replicas import sparse_parameters
from bagua_kernels.algorithms.wrapping.tiers import even_nodes
from bagua_kernels.comm.compressed.encoded_mean import EncodedMean
from bagua_kernels.comm.mailbox.courier import weakly
from bagua_kernels.comm.mailbox.groups import Whole
from bagua_kernels.comm.mailbox.triggered import Execution, TriggeredAverage
from bagua_kernels.compression.codec import Codec, from_spec


@register
class AsyncModelAverage(CourierAlgorithm):
    """Ranks train by themselves, and beside that average over and over (the asynchronous algorithm of BAGUA, Gan et al., 2021).

    1. Take `warmup_steps` steps of the optimizer with the mean of all ranks' gradients, as `GradientAllReduce` makes it.
    2. From then on a round begins at times: each rank reads its model, r, and the ranks have the mean.
    3. Each rank adds mean - r before the next pass after that, whatever it has learned meanwhile.

    No rank's training waits for another's, nor does a round wait for any training.

    Options and their defaults, all by keyword::

        interval_ms=None       milliseconds from the end of a round to the beginning of the next one; 500 if there is no
                               `interval`
        interval=None          steps of the rank that takes most of them, in place of a time
        warmup_steps=0         steps of all ranks before the first round
        codec=None             a codec or its spec; it encodes differences to the last mean, with error feedback
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        scaler=None            a `GradScaler` that may leave out this optimizer's step on one rank alone
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "async_model_average"
    # BAGUA's.
    synonyms = MappingProxyType({"sync_interval_ms": "interval_ms"})
    needs_even_nodes = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval_ms: float | None = None,
        interval: int | None = None,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            interval_ms: milliseconds from the end of a round to the beginning of the next one; 500 if there is no `interval`.
            interval: steps of the rank that takes most of them, in place of a time.
            warmup_steps: steps of all ranks before the first round.
            codec: a codec or its spec; it encodes differences to the last mean, with error feedback. None for full precision.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: an interval is not above 0, or there are two; or as for `ModelAlgorithm`.
        """
        if interval_ms is not None and interval is not None:
            raise ValueError(f"expected interval_ms or interval, got both: {interval_ms=} and {interval=}")
        if not (interval_ms is None or interval_ms >= 0) or not (interval is None or interval >= 1) or warmup_steps < 0:
            raise ValueError(
                f"interval_ms and warmup_steps must be at least 0, interval at least 1, got {interval_ms=}, {interval=} and "
                f"{warmup_steps=}"
            )
        self.interval_ms, self.interval, self.warmup_steps = interval_ms, interval, warmup_steps
        if interval is None and interval_ms is None:
            self.interval_ms = 500.0
        self.codec: Codec | None = from_spec(codec) if isinstance(codec, str) else codec
        if codec is not None:
            self.refuses_tiers = "with a codec each rank's difference to the last mean is encoded, not that of its node"
        self._timed: TimedAverages | None = None
        super().__init__(module, optimizer, **options)

    def averages_for(self, local: LocalModel) -> TimedAverages:
        """See `CourierAlgorithm.averages_for`."""
        rows = sparse_parameters(self.module)
        members = [Member(name, p, sparse=p in rows) for name, p in local.flat.parameters.items()]
        warm_up = WarmUp(self.warmup_steps, members, self._bucket_bytes)
        self._timed = TimedAverages(local, self.interval_ms, self.interval, self.codec, warm_up)
        self._timed.set_sync(self.require_backward_grad_sync)
        return self._timed

    def _set_sync(self, value: bool) -> None:
        """See `WrappedModule._set_sync`; there is something to withhold in the first steps only."""
        super()._set_sync(value)
        if self._timed is not None:
            self._timed.set_sync(value)

    def pause(self) -> None:
        """Lets this rank start no more rounds; it takes part in those that others start."""
        if self._timed is not None:
            self._timed.paused = True

    def resume(self) -> None:
        """Ends a pause."""
        if self._timed is not None:
            self._timed.paused = False


@dataclass(frozen=True)
class WarmUp:
    """The first steps, in which gradients are averaged.

    Attributes:
        steps: their number.
        members: the parameters whose gradients are averaged.
        bucket_bytes: the size of the buckets.
    """

    steps: int
    members: list[Member]
    bucket_bytes: int


class TimedAverages(Averages):
    """Starts averages of all ranks at times, or after numbers of steps.

    Attributes:
        paused: True if this rank starts none.
    """

    def __init__(
        self, local: LocalModel, interval_ms: float | None, interval: int | None, codec: Codec | None, warm_up: WarmUp
    ) -> None:
        """Makes the courier; collective.

        Args:
            local: as for `Loop`.
            interval_ms: milliseconds from the end of a round to the beginning of the next one; None for `interval`.
            interval: steps of this rank for each of which it starts a round; None for a time.
            codec: of what models differ from the last mean; None for full precision.
            warm_up: the first steps.
        """
        super().__init__(local)
        self.paused = False
        self._interval, self._codec, self._warm_up = interval, codec, warm_up
        mailbox = local.mailbox
        self._encoded = [] if codec is None else [EncodedMean(mailbox, codec, each.flat) for each in local.flat.buckets]
        self._warm, self._syncs = 0, True
        self._engine: Engine | None = None
        self._rounds, self._ended = 0, -math.inf
        groups = Whole(local.communicator.size)
        groups.check(local.communicator)
        self.average = self._triggered = TriggeredAverage(
            self.courier,
            groups,
            None,
            self.model,
            replaces=False,
            nodes=even_nodes(local.communicator),
            group_mean=None if codec is None else weakly(self._encoded_mean),
            on_execution=weakly(self._count),
            ends_early=True,
        )
        if interval_ms is not None:
            self._seconds = interval_ms / 1000
            self.courier.every(max(self._seconds / 4, 0.001), weakly(self._start_if_due))

    def prepare(self) -> None:
        """See `Loop.prepare`: step 1 in the beginning."""
        self._average_gradients()

    def _average_gradients(self) -> None:
        """Lets backward passes average gradients until the first steps are over; collective."""
        warm, local = self._warm >= self._warm_up.steps, self.local
        if warm and self._engine is not None:
            self._engine.close()
            self._engine = None
        elif not warm and self._engine is None and self._warm_up.members:
            options = EngineOptions(BucketOptions(1, self._warm_up.bucket_bytes), name=local.name, title=local.title)
            members = self._warm_up.members
            self._engine = Engine(members, Mean, local.communicator, local.connect, Policy(), options)
            self._engine.enabled = self._syncs

    def set_sync(self, value: bool) -> None:
        """Lets backward passes average gradients, or not, while the first steps last."""
        self._syncs = value
        if self._engine is not None:
            self._engine.enabled = value

    def at_forward(self, training: bool) -> None:
        """See `Loop.at_forward`."""
        super().at_forward(training)
        if self._engine is not None:
            self._engine.check_idle()

    def after_step(self) -> None:
        """See `Averages.after_step`."""
        self._warm += 1
        self._average_gradients()
        interval = self._interval
        if interval is not None and self.local.steps % interval == interval - 1 and self._is_running():
            self._triggered.start()

    def numbers(self) -> dict[str, Any]:
        """See `Loop.numbers`."""
        return {"warm": float(self._warm)}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Loop.load_numbers`."""
        self._warm = int(numbers.get("warm", self._warm))
        self._average_gradients()

    def stop(self) -> None:
        """See `Loop.stop`."""
        super().stop()
        if self._engine is not None:
            self._engine.shut_down([self.local.communicator, *self.local.opened])
            self._engine = None

    def _is_running(self) -> bool:
        return not self.paused and self._warm >= self._warm_up.steps and not self._triggered.rests

    def _start_if_due(self) -> None:
        if self._is_running() and self.local.mailbox.clock.now() >= self._ended + self._seconds:
            self._triggered.start()

    def _encoded_mean(self, members: Sequence[int], index: int, vector: torch.Tensor, number: int) -> None:
        self._encoded[index].exchange(vector, number)

    def _count(self, execution: Execution) -> None:
        self._rounds += 1
        self._ended = self.local.mailbox.clock.now()

    @property
    def has_references(self) -> bool:
        """See `Averages.has_references`."""
        return self._codec is not None

    def set_references(self, vectors: list[torch.Tensor]) -> None:
        """See `Averages.set_references`; what payloads have lacked is forgotten."""
        for mean, vector in zip(self._encoded, vectors, strict=False):
            mean.restart(vector)

    def residual_norm(self) -> float:
        """See `Loop.residual_norm`."""
        return math.hypot(*(norm for mean in self._encoded for norm in mean.residual_norms()))

    def stats(self, stats: Stats) -> Stats:
        """See `Loop.stats`."""
        return replace(super().stats(stats), rounds=self._rounds)
