"""Gradient averaging through any codec: what most algorithms of this package are special cases of."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.engine.units import Units
from bagua_kernels.algorithms.engine.vectors import Named, gather, scatter
from bagua_kernels.algorithms.policy.guard import Guard, Sample, answer
from bagua_kernels.algorithms.policy.only_if_faster import Trial
from bagua_kernels.algorithms.policy.optimizer_fit import holds_back
from bagua_kernels.algorithms.policy.schedule import Encoding, Plan, Schedule
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.compressed import AllReduce, Deliver, all_reduce_for
from bagua_kernels.compression import Codec, Contractive, fold_seed, from_spec
from bagua_kernels.compression.codec import to_spec

# For codecs of few bits, or few elements. They would starve small tensors: what is largest in a bucket is seldom in a bias, and
# a scale costs as much for the few elements of a short block as for those of a full one.
LARGE_MATRICES: dict[str, Any] = {"exact": "1d", "min_numel": 512}


@register
class CompressedAllReduce(Algorithm):
    """Synchronous data parallelism with gradients that travel as a codec's payloads.

    For each bucket of gradients, in the order in which backward completes them:

    1. In the first `warmup_steps` steps, average it without compression, as `GradientAllReduce` does.
    2. With error feedback, add what this rank's earlier payloads of it lacked (Karimireddy et al., ICML 2019, algorithm 2).
    3. Average it by the all-reduce that suits the codec (`bagua_kernels.comm.compressed.all_reduce_for`): in two passes over
       the chunks' owners for dense codecs (BAGUA, VLDB 2022, section 3.1), by all-gather for sparse ones, and by the
       network's own sum for linear ones. Owners keep what the encoded mean lacks, too (DoubleSqueeze, Tang et al., ICML 2019).
    4. Keep what was lacking; give everyone the same bits.

    Parameters that are `exact` travel uncompressed behind the payload of their bucket, to the owners of chunks and back.
    """

    name = "compressed"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Encoding = "minmax_uint8",
        error_feedback: bool | None = None,
        owner_feedback: bool | None = None,
        warmup_steps: int = 0,
        groups: Mapping[str, Encoding] | None = None,
        exact: str | tuple[str, ...] | list[str] = (),
        min_numel: int = 0,
        seed: int = 0,
        guard: Guard | None = None,
        scaler: torch.amp.GradScaler | None = None,
        only_if_faster: bool = False,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            codec: a codec, its spec, or codecs by the step from which on they are used: `{0: "minmax_uint8", 1000:
                "minmax_uint4"}`. None stands for no compression.
            error_feedback: whether each rank keeps what its payloads lack; by default where the codec is biased.
            owner_feedback: whether the owners of chunks do; by default as `error_feedback`.
            warmup_steps: steps without compression at the beginning.
            groups: other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`.
            exact: patterns of names of parameters to average without compression; "1d" for all biases and norms.
            min_numel: parameters with fewer elements are exact too.
            seed: of random numbers.
            guard: looks now and then how much is lost; `stats().errors` tells.
            scaler: that by which losses are scaled, if any: residuals change their unit with it. Read in backward, so
                update it after the optimizer's step.
            only_if_faster: whether 36 steps, from the first that would be compressed, find out if compression is faster
                than none, by turns of four steps with it and four without. If it is slower, it is switched off for good,
                which `stats().trial` tells and a checkpoint keeps. Results then depend on the time measured: ranks stay
                bit-identical, but runs do not repeat bit for bit.
            **arguments: as for `Algorithm`.

        Raises:
            TypeError: a codec is none.
            ValueError: a spec or a number does not fit, or as for `Algorithm`.
        """
        self.plan = Plan.make(codec, warmup_steps, groups, exact, min_numel)
        self.error_feedback = error_feedback
        self.owner_feedback = owner_feedback
        self.seed = seed
        self.guard = guard
        self._units = Units(scaler, bool(arguments.get("apply_in_backward")))
        self._trial = Trial() if only_if_faster else None
        self._errors: dict[str, float] = {}
        self._instead: dict[Hashable, Codec | None] = {}
        self._decided: dict[int, tuple[Hashable, Codec | None]] = {}
        self._all_reduces: dict[int, AllReduce] = {}
        self._recalled: dict[int, Mapping[str, torch.Tensor]] = {}
        super().__init__(module, optimizer, **arguments)

    @property
    def holds_back(self) -> str:
        """See `Algorithm.holds_back`."""
        coarse = [codec for codec in self.plan.codecs if holds_back(codec)]
        return f"payloads of {coarse[0]!r}" if coarse else ""

    @property
    def alignment(self) -> int:
        """A block never spans two tensors."""
        return self.plan.alignment()

    @property
    def lends(self) -> bool:
        """See `Algorithm.lends`; a subclass may expect gradients in the bucket."""
        return type(self).exchange is CompressedAllReduce.exchange

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `Algorithm.place`."""
        return self.plan.place(name, parameter)

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        self._convert(bucket)
        codec = self.codec_at(bucket, step)
        if not self._reads_pieces(bucket, codec, step):
            bucket.collect()
        if codec is None or not bucket.flat.numel():
            found = self._all_reduces.pop(bucket.index, None)
            self._hand_over(bucket, self._recalled.pop(bucket.index, {}) if found is None else found.vectors(), set())
            self.lane(bucket).all_reduce(bucket.whole, ReduceOp.AVG).wait()
            return
        sample = Sample(bucket, self.lane(bucket)) if self._samples(bucket, step) else None
        all_reduce, seed = self._all_reduce(bucket, codec), fold_seed(self.seed, step, bucket.index)
        # The guard compares what has been decoded.
        with self._delivery(bucket, codec, sample is None and all_reduce.delivers) as deliver:
            source = bucket.pieces if bucket.lent else None
            with all_reduce.withheld(self.frozen_spans(bucket)):
                all_reduce(bucket.flat, bucket.exact, seed=seed, source=source, deliver=deliver)
        if self.guard is not None and sample is not None:
            error, errors = sample.errors(bucket)
            self._errors.update(errors)
            then = answer(self.guard, codec, bucket, error, self.alignment)
            if then != codec:
                self._decided[bucket.index] = (bucket.kind, then)

    def frozen_spans(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Where the compressed parameters that are frozen now lie in a bucket: begins and ends."""
        spans = [bucket.spans[slot] for slot in self.frozen(bucket) if bucket.compressed(slot)]
        return [(span.start, span.stop) for span in spans]

    def _samples(self, bucket: Bucket, step: int) -> bool:
        return self.guard is not None and (step + bucket.index) % self.guard.every == 0

    def _reads_pieces(self, bucket: Bucket, codec: Codec | None, step: int) -> bool:
        """Whether gradients need not be in the bucket, since only the all-reduce looks at them, and does so piece by piece."""
        found = self._all_reduces.get(bucket.index)
        if found is None or found.codec != codec or self._samples(bucket, step):
            return False
        return found.reads_pieces and found.codec.block == bucket.align

    def _delivery(self, bucket: Bucket, codec: Codec, possible: bool) -> AbstractContextManager[Deliver | None]:
        """What the bucket's payloads are given to instead of being decoded.

        A subclass whose `exchange` changes `bucket.flat` after this one's gives a null context.
        """
        if self._steps is None or not possible:
            return contextlib.nullcontext()
        return self._steps.deliver(bucket, codec)

    def codec_at(self, bucket: Bucket, step: int) -> Codec | None:
        """What encodes a bucket in a step; None if nothing does."""
        assert isinstance(bucket.kind, Schedule)
        planned = bucket.kind.at(step) if self._trial is None or self._trial.compresses(step) else None
        # What the guard decided holds on, but a warm-up stays one.
        return self._instead.get(bucket.kind, planned) if planned is not None else None

    def compresses(self, bucket: Bucket, step: int) -> bool:
        """See `Algorithm.compresses`."""
        return bucket.flat.numel() > 0 and self.codec_at(bucket, step) is not None

    def lasting(self, step: int) -> bool:
        """See `Algorithm.lasting`."""
        return step >= self.plan.last_start

    def settle(self, step: int, seconds: float) -> None:
        """See `Algorithm.settle`: what the guard decided holds from the next step on."""
        super().settle(step, seconds)
        self._instead.update(self._decided[index] for index in sorted(self._decided))
        self._decided.clear()

    def errors(self) -> dict[str, float]:
        """See `Algorithm.errors`."""
        return dict(self._errors)

    def _all_reduce(self, bucket: Bucket, codec: Codec) -> AllReduce:
        """The bucket's all-reduce, which goes on with the residuals of the codec before; collective when the codec changes."""
        found = self._all_reduces.get(bucket.index)
        if found is not None and found.codec == codec:
            return found
        vectors = found.vectors() if found is not None else self._recalled.pop(bucket.index, {})
        lossy = isinstance(codec.bias, Contractive) and codec.bias.delta < 1
        feedback = lossy if self.error_feedback is None else self.error_feedback
        made = all_reduce_for(
            codec,
            self.lane(bucket),
            bucket.flat.numel(),
            bucket.exact.numel(),
            bucket.whole.dtype,
            worker_residual=feedback,
            owner_residual=feedback if self.owner_feedback is None else self.owner_feedback,
            own=bucket.own,
        )
        self._all_reduces[bucket.index] = made
        if vectors:
            made.load_vectors(vectors)
            self._hand_over(bucket, vectors, {key for key, kept in made.residuals().items() if kept is not None})
        return made

    def _hand_over(self, bucket: Bucket, vectors: Mapping[str, torch.Tensor], kept: set[str]) -> None:
        """Adds residuals to the gradient for which the next all-reduce has no place."""
        for key in sorted(vectors.keys() - kept):
            # The mean of what workers lack is to come yet; the owners' is the same here on all ranks, as is its mean.
            bucket.flat.add_(vectors[key])

    def _convert(self, bucket: Bucket) -> None:
        """Brings what is remembered of a bucket to the scale of its gradients."""
        factor = self._units.change(bucket.index)
        if factor != 1.0:
            self._rescale(bucket, factor)

    def _rescale(self, bucket: Bucket, factor: float) -> None:
        found = self._all_reduces.get(bucket.index)
        for residuals in () if found is None else found.residuals().values():
            if residuals is not None:
                residuals.scale(factor)
        for vector in self._recalled.get(bucket.index, {}).values():
            vector.mul_(factor)

    def remembered(self, bucket: Bucket) -> dict[str, Named]:
        """The residuals, without scale; see `Algorithm.remembered`."""
        found = self._all_reduces.get(bucket.index)
        vectors = self._recalled.get(bucket.index, {}) if found is None else found.vectors()
        unit = self._units.of(bucket.index)
        return {key: scatter(bucket, vector / unit) for key, vector in vectors.items()}

    def remember(self, bucket: Bucket, vectors: Mapping[str, Named]) -> None:
        """See `Algorithm.remember`."""
        self._recalled[bucket.index] = {
            key: gather(bucket, vectors[key]) for key in ("worker", "owner") if key in vectors
        }

    def forget(self) -> None:
        """See `Algorithm.forget`."""
        self._all_reduces.clear()
        self._recalled.clear()
        self._units.forget()

    def decisions(self) -> list[Any]:
        """The specs of the codecs that the guard decided on, by `Plan.schedules`, too; see `Algorithm.decisions`."""
        decided = [
            (pattern, None if (codec := self._instead[schedule]) is None else to_spec(codec))
            for pattern, schedule in self.plan.schedules.items()
            if schedule in self._instead
        ]
        return [*super().decisions(), *([("guard", decided)] if decided else [])]

    def take_decisions(self, decisions: list[Any]) -> None:
        """See `Algorithm.take_decisions`."""
        super().take_decisions(decisions)
        schedules = self.plan.schedules
        self._instead = {
            schedules[pattern]: None if spec is None else from_spec(spec)
            for pattern, spec in dict(decisions).get("guard", ())
            if pattern in schedules
        }
        # Earlier states hold the schedules and codecs themselves.
        self._instead |= {kind: codec for kind, codec in decisions if isinstance(kind, Schedule)}

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        norms = [(i, r.norm()) for i, a in self._all_reduces.items() for r in a.residuals().values() if r is not None]
        norms += [(i, vector.norm()) for i, vectors in self._recalled.items() for vector in vectors.values()]
        return math.sqrt(math.fsum((float(norm) / self._units.of(i)) ** 2 for i, norm in norms))
