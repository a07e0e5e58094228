"""The exchange of a bucket through any codec."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from bagua_kernels.algorithms.exchanges.exchange import WHOLE, Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named, copied, gather, scatter
from bagua_kernels.algorithms.policy.guard import Decision, Guarded, Sample
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp, Work
from bagua_kernels.comm.compressed import AllReduce, Deliver, all_reduce_for
from bagua_kernels.compression import Codec, Contractive, fold_seed
from bagua_kernels.quotient import divided
from bagua_kernels.streams import keep_memory


@dataclass(frozen=True)
class Feedback:
    """Which ranks keep residuals, and the seed of random numbers.

    Attributes:
        workers: True if each rank keeps what its payloads lack; None: if the codec is biased.
        owners: True if the owners of chunks do; None: as `workers`.
        seed: of random numbers.
    """

    workers: bool | None = None
    owners: bool | None = None
    seed: int = 0

    def of_workers(self, codec: Codec) -> bool:
        """Returns True if each rank keeps what its payloads of a codec lack."""
        lossy = isinstance(codec.bias, Contractive) and codec.bias.delta < 1
        return lossy if self.workers is None else self.workers


class CompressedExchange(Exchange):
    """Averages a bucket with the codec that its policy chooses, and with error feedback.

    Attributes:
        policy: chooses the codec of the bucket in a step.
        feedback: see there.
    """

    reads_in_place = True
    delivers = True

    def __init__(self, bucket: Bucket, communicator: Communicator, policy: Policy, feedback: Feedback) -> None:
        """Begins without residuals."""
        super().__init__(bucket, communicator)
        self.policy = policy
        self.feedback = feedback
        self._guarded = next((each for each in policy.chain() if isinstance(each, Guarded)), None)
        # Of the step under way: in it, the others of this kind are still encoded as before.
        self._decision: Decision | None = None
        # Residuals are either those of the all-reduce, or vectors that wait for one.
        self._all_reduce: AllReduce | None = None
        self._recalled: dict[str, torch.Tensor] = {}
        self._gathers = True  # the parts of vectors that other ranks have

    def codec(self, step: int) -> Codec | None:
        """What encodes the bucket in a step; None if nothing does."""
        found: Codec | None = self.policy.codec(self.bucket.kind, step) if self.bucket.flat.numel() else None
        return found

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        bucket, codec = self.bucket, self.codec(step)
        guard = None if self._guarded is None or not self._guarded.looks(bucket, step) else self._guarded
        if guard is not None or not self._reads_pieces(codec):
            bucket.collect()
        if codec is None:
            vectors, self._recalled = self._vectors(), {}
            self._all_reduce = None
            self.hand_over(vectors, set())
            yield self.communicator.all_reduce(bucket.whole, ReduceOp.AVG)
            return
        sample = None if guard is None else Sample(bucket, self.communicator)
        all_reduce, seed = self.all_reduce(codec), fold_seed(self.feedback.seed, step, bucket.index)
        frozen = [bucket.spans[slot] for slot in bucket.frozen if bucket.compressed(slot)]
        # The guard compares what has been decoded.
        with self._delivery(codec, sample is None and all_reduce.delivers) as deliver:
            source = bucket.pieces if bucket.lent else None
            with all_reduce.withheld([(span.start, span.stop) for span in frozen]):
                yield from all_reduce.steps(bucket.flat, bucket.exact, seed=seed, source=source, deliver=deliver)
        if guard is not None and sample is not None:
            self._decision = guard.judge(bucket, codec, sample)

    def end_step(self, unused: Sequence[int]) -> None:
        """See `Exchange.end_step`: what a guard has decided holds from the next step on."""
        if self._guarded is not None and self._decision is not None:
            self._guarded.decide(self._decision)
            self._decision = None

    def _reads_pieces(self, codec: Codec | None) -> bool:
        """Returns True if only the all-reduce reads the gradients, piece by piece, so that they need not be in the bucket."""
        found = self._all_reduce
        if found is None or found.codec != codec:
            return False
        return found.reads_pieces and found.codec.block == self.bucket.align

    def _delivery(self, codec: Codec, possible: bool) -> AbstractContextManager[Deliver | None]:
        """What payloads are given to instead of being decoded."""
        if self.updates is None or not possible or not self.delivers:
            return contextlib.nullcontext()
        return self.updates.from_payloads(codec)

    def all_reduce(self, codec: Codec) -> AllReduce:
        """The bucket's all-reduce, which goes on with the residuals of the codec before; collective when the codec changes."""
        found = self._all_reduce
        if found is not None and found.codec == codec:
            return found
        vectors = self._vectors()
        workers = self.feedback.of_workers(codec)
        self._all_reduce = made = all_reduce_for(
            codec,
            self.communicator,
            self.bucket.flat.numel(),
            self.bucket.exact.numel(),
            self.bucket.whole.dtype,
            worker_residual=workers,
            owner_residual=workers if self.feedback.owners is None else self.feedback.owners,
            own=self.bucket.own,
        )
        self._recalled = {}
        if vectors:
            made.load_vectors(vectors)
            self.hand_over(vectors, {key for key, kept in made.residuals().items() if kept is not None})
        return made

    def hand_over(self, vectors: Mapping[str, torch.Tensor], kept: set[str]) -> None:
        """Adds residuals to the gradient for which the next all-reduce has no place."""
        for key in sorted(vectors.keys() - kept):
            # Worker residuals are averaged with this step's gradient. The owner residual is equal on all ranks, so
            # averaging leaves it as it is.
            self.bucket.flat.add_(vectors[key])

    def _vectors(self) -> dict[str, torch.Tensor]:
        """The residuals as vectors like the bucket; collective."""
        if self._all_reduce is not None:
            return self._all_reduce.vectors() if self._gathers else self._all_reduce.own_vectors()
        # They may have been made on the training stream, and the communication stream drops them.
        keep_memory(self._recalled.values())
        return self._recalled

    def worker_residual(self, codec: Codec) -> torch.Tensor:
        """A copy of what this rank's payloads lacked; collective when the codec changes."""
        residuals = self.all_reduce(codec).residuals()["worker"]
        assert residuals is not None
        return residuals.state()

    def add_to_worker_residual(self, begin: int, values: torch.Tensor) -> None:
        """Adds values, of any number of elements of the bucket from one on, to what this rank's payloads lacked."""
        if self._all_reduce is not None:
            worker = self._all_reduce.residuals().get("worker")
            if worker is not None:
                worker.add(begin, values)
        elif values.any():  # sent without compression: residuals that were handed over
            if "worker" not in self._recalled:
                self._recalled["worker"] = torch.zeros_like(self.bucket.flat, dtype=torch.float32)
            self._recalled["worker"][begin : begin + values.numel()] += values

    def rescale(self, factor: float) -> None:
        """See `Exchange.rescale`."""
        residuals = {} if self._all_reduce is None else self._all_reduce.residuals()
        for kept in residuals.values():
            if kept is not None:
                kept.scale(factor)
        for vector in self._recalled.values():
            vector.mul_(factor)

    def state(self) -> dict[str, Named]:
        """The residuals; see `Exchange.state`."""
        return {key: scatter(self.bucket, divided(vector, self.loss_scale)) for key, vector in self._vectors().items()}

    def own_state(self) -> dict[str, Named]:
        """See `Exchange.own_state`."""
        self._gathers = False
        try:
            found = super().own_state()
        finally:
            self._gathers = True
        if self._all_reduce is None and "owner" in found:
            # From a state, of which no step has taken this rank's part yet.
            found[WHOLE] = found.pop("owner")
        return found

    def mark(self, spare: list[torch.Tensor]) -> Callable[[], dict[str, Named]]:
        """See `Exchange.mark`: one copy of the residuals, in memory that was touched before."""
        made, scale = self._all_reduce, self.loss_scale
        if made is None or type(self).state is not CompressedExchange.state:
            return super().mark(spare)
        parts = _parts(made)
        spare[:] = [copied(part, old) for part, old in zip(parts, [*spare, *[None] * len(parts)], strict=False)]
        kept = [*spare]

        def back() -> dict[str, Named]:
            for part, before in zip(_parts(made), kept, strict=True):
                part.copy_(before)
            self._all_reduce, self._recalled, self.loss_scale = made, {}, scale
            return self.own_state()

        return back

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Exchange.load`."""
        self._all_reduce = None
        self._recalled = {key: gather(self.bucket, state[key]) for key in ("worker", "owner") if key in state}

    def residual_norm(self) -> float:
        """See `Exchange.residual_norm`."""
        kept = {} if self._all_reduce is None else self._all_reduce.residuals()
        # waits: for statistics.
        norms = [float(each.norm()) for each in kept.values() if each is not None]
        # waits: for statistics.
        norms += [float(vector.norm()) for vector in self._recalled.values()]
        return math.sqrt(math.fsum((norm / self.loss_scale) ** 2 for norm in norms))


def _parts(all_reduce: AllReduce) -> list[torch.Tensor]:
    """All residuals themselves, in pieces."""
    return [part for kept in all_reduce.residuals().values() if kept is not None for part in kept.parts()]
