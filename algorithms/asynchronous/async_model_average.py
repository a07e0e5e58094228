"""Averages of all ranks beside training, at times of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import torch

from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.asynchronous.published_model import PublishedModel
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.engine.member import Member
from bagua_kernels.algorithms.engine.options import BucketOptions, EngineOptions
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.model_algorithm import ModelOptions
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.replicas import sparse_parameters
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.compressed.encoded_mean import EncodedMean
from bagua_kernels.comm.mailbox.courier import Courier, weakly
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
    """

    name = "async_model_average"

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
            codec: which encodes what models differ from the last mean, with error feedback; or its spec. None for full precision.
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
        self._encoded: list[EncodedMean] = []
        self._paused, self._warm = False, 0
        self._engine: Engine | None = None
        self._duplicates: list[Communicator] = []
        self._rounds, self._ended = 0, -math.inf
        super().__init__(module, optimizer, **options)

    def make_average(self, courier: Courier, model: PublishedModel) -> TriggeredAverage:
        """See `CourierAlgorithm.make_average`."""
        codec, mailbox = self.codec, courier.mailbox
        if codec is not None:
            self._encoded = [EncodedMean(mailbox, codec, bucket.flat) for bucket in self.flat.buckets]
        groups = Whole(self._communicator.size)
        groups.check(self._communicator)
        self._triggered = TriggeredAverage(
            courier,
            groups,
            None,
            model,
            replaces=False,
            group_mean=None if codec is None else weakly(self._encoded_mean),
            on_execution=weakly(self._count),
        )
        if self.interval_ms is not None:
            self._seconds = self.interval_ms / 1000
            courier.every(max(self._seconds / 4, 0.001), weakly(self._start_if_due))
        return self._triggered

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`: step 1 in the beginning."""
        super()._start(module, optimizer)
        self._warm_up()
        self._setup_bytes = self._bytes_sent

    def _warm_up(self) -> None:
        """Lets backward passes average gradients until the first steps are over; collective."""
        warm = self._warm >= self.warmup_steps
        if warm and self._engine is not None:
            self._engine.close()
            self._engine = None
        elif not warm and self._engine is None and self.flat.parameters:
            rows = sparse_parameters(self.module)
            members = [Member(name, p, sparse=p in rows) for name, p in self.flat.parameters.items()]
            options = EngineOptions(BucketOptions(1, self._bucket_bytes), name=self.name, title=type(self).__name__)
            self._engine = Engine(members, Mean, self._communicator, self._duplicate, Policy(), options)
            self._engine.enabled = self.require_backward_grad_sync

    def _duplicate(self) -> Communicator:
        self._duplicates.append(self._world.duplicate())
        return self._duplicates[-1]

    def _communicators(self) -> list[Communicator]:
        """See `Algorithm._communicators`."""
        return [*super()._communicators(), *self._duplicates]

    def _set_sync(self, value: bool) -> None:
        """See `WrappedModule._set_sync`; there is something to withhold in the first steps only."""
        super()._set_sync(value)
        if self._engine is not None:
            self._engine.enabled = value

    def at_forward(self, training: bool) -> None:
        """See `ModelAlgorithm.at_forward`."""
        super().at_forward(training)
        if self._engine is not None:
            self._engine.check_idle()

    def after_step(self) -> None:
        """See `CourierAlgorithm.after_step`."""
        self._warm += 1
        self._warm_up()
        if self.interval is not None and self._steps % self.interval == self.interval - 1 and self._is_running():
            self._triggered.start()

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`."""
        return {"warm": float(self._warm)}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """See `ModelAlgorithm.load_numbers`."""
        self._warm = int(numbers.get("warm", self._warm))
        self._warm_up()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        super()._stop()
        if self._engine is not None:
            self._engine.shut_down(self._communicators())
            self._engine = None

    def pause(self) -> None:
        """Lets this rank start no more rounds; it takes part in those that others start."""
        self._paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False

    def _is_running(self) -> bool:
        return not self._paused and self._warm >= self.warmup_steps and not self._triggered.rests

    def _start_if_due(self) -> None:
        if self._is_running() and self.mailbox.clock.now() >= self._ended + self._seconds:
            self._triggered.start()

    def _encoded_mean(self, members: Sequence[int], index: int, vector: torch.Tensor, number: int) -> None:
        self._encoded[index].exchange(vector, number)

    def _count(self, execution: Execution) -> None:
        self._rounds += 1
        self._ended = self.mailbox.clock.now()

    @property
    def has_references(self) -> bool:
        """See `CourierAlgorithm.has_references`."""
        return self.codec is not None

    def set_references(self, vectors: list[torch.Tensor]) -> None:
        """See `CourierAlgorithm.set_references`; what payloads have lacked is forgotten."""
        for mean, vector in zip(self._encoded, vectors, strict=False):
            mean.restart(vector)

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        return math.hypot(*(norm for mean in self._encoded for norm in mean.residual_norms()))

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), rounds=self._rounds)
