"""Encoded differences among neighbours, and the guard that watches them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.rounds.mixing import Peers, checked_peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Work
from bagua_kernels.comm.compressed.layout import own_counts
from bagua_kernels.comm.topology import Topology, weighted_sum
from bagua_kernels.compression import BlockCodec, Codec, encode_rule, fold_seed, from_spec
from bagua_kernels.errors import DivergenceError
from bagua_kernels.rules.messages import MessageRule

_SAMPLE = 1 << 16  # elements of a bucket that the guard looks at
_EVERY = 8  # rounds from one look of the guard to the next
_LOUD = 0.75  # squared error, relative to what was encoded, from which on a codec may add more than it takes away
_GROWTH = 8.0  # by how much differences have grown, over what they should be, when they diverge
_FIRST = 4  # looks by whose medians it is known what they should be


class Differences(RoundAlgorithm):
    """Base of the algorithms that send encoded differences to all neighbours of one symmetric topology.

    Attributes:
        codec: encodes differences.
        topology: the mixing matrix.
        ranks: this rank and its neighbours, ascending.
        weights: of `ranks`, in their order.
        remedy: what else to use where an algorithm diverges.
    """

    remedy = "Choco, which scales what it sends"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Codec | str = "minmax_uint8",
        peers: Peers = "ring",
        seed: int = 0,
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. See the subclasses for arguments."""
        self.codec = from_spec(codec) if isinstance(codec, str) else codec
        if not isinstance(self.codec, Codec):
            raise TypeError(f"expected a codec, or the spec of one, got {codec!r}")
        self.peers, self.seed = checked_peers(peers), seed
        self._guards: dict[int, _Guard] = {}
        self._decay: float | None = None
        self._payloads: dict[int, torch.Tensor] = {}
        # The first elements of each bucket before the step after which the guard looks.
        self._before: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor | None] = {}
        super().__init__(module, optimizer, **options)

    def alignment_of(self, kind: Any) -> int:
        """See `ModelAlgorithm.alignment_of`."""
        return self.codec.block

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        if double := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
            return f"codecs take float32, float16 and bfloat16, and parameter {double[0]!r} is float64: convert the module before"
        return super()._misfit(trained)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        self.topology: Topology = topology_of(self.peers, mailbox.size)
        self.topology.check(self._communicator, "symmetric")
        if self.topology.period != 1:
            raise ValueError(
                f"{type(self).__name__} keeps what its neighbours have, and expects one matrix for all steps, got "
                f"{self.topology!r}: use a static topology such as a ring"
            )
        self._decay = self.topology.rho()
        self.neighbours = self.topology.neighbours_in(mailbox.rank)
        weights = {rank: weight for rank, weight in self.topology.weights(mailbox.rank).items() if weight}
        self.ranks, self.weights = list(weights), list(weights.values())
        if mailbox.rank not in weights:
            raise ValueError(
                f"{type(self).__name__} expects each rank to keep a part of its own, got {self.topology!r}: use Lazy"
            )
        for bucket in self.flat.buckets:
            self._guards[bucket.index] = _Guard(type(self).__name__, self.codec, self.remedy)
            self._counts[bucket.index] = None
            if isinstance(self.codec, BlockCodec):
                counts = own_counts(bucket.own, bucket.flat.numel(), self.codec.block)
                # waits: once for each bucket.
                self._counts[bucket.index] = counts.to(bucket.flat.device)

    def encode(
        self,
        bucket: Bucket,
        turn: int,
        rule: MessageRule,
        arrays: Sequence[torch.Tensor],
        scalars: Sequence[float] = (),
        replicas: torch.Tensor | None = None,
    ) -> Iterator[Work]:
        """Encodes what a rule makes of vectors, and exchanges it; afterwards `payloads` has those of all of `ranks`.

        Args:
            bucket: to which the vectors belong.
            turn: number of the round.
            rule: see `bagua_kernels.compression.encode_rule`, as for the other arguments.
            arrays: of the rule, the parameters first.
            scalars: of the rule.
            replicas: of which the weighted sum is the rule's last array, if there are any.
        """
        payloads, place = self.payloads(bucket), self.ranks.index(self.mailbox.rank)
        looks = turn % _EVERY == 0
        # Of a large bucket the first elements show as much.
        expected = self._value(rule, [each[:_SAMPLE] for each in arrays], scalars, replicas) if looks else None
        # Some rules write new parameters.
        now = bucket.flat[:_SAMPLE].to(torch.float32, copy=True) if looks else bucket.flat
        seed = fold_seed(self.seed, turn, bucket.index, self.mailbox.rank)
        options: dict[str, Any] = {"replicas": replicas, "weights": None if replicas is None else self.weights}
        encode_rule(
            self.codec,
            rule,
            arrays,
            scalars,
            seed=seed,
            out=payloads[place],
            counts=self._counts[bucket.index],
            **options,
        )
        if expected is not None:
            decoded = self.codec.decode(payloads[place], torch.empty_like(bucket.flat, dtype=torch.float32))
            # Padding between parameters holds what nobody reads.
            spans = [slice(span.start, min(span.stop, _SAMPLE)) for span in bucket.own if span.start < _SAMPLE]
            difference, decoded, x = (
                torch.cat([vector[span] for span in spans]) for vector in (expected, decoded, now)
            )
            before = self._before.pop(bucket.index, None)
            step = None if before is None else x - torch.cat([before[span] for span in spans])
            # waits: a guard looks at few rounds.
            rate = max(float(group.get("lr", 1.0)) for group in self._optimizer.param_groups)
            self._guards[bucket.index].look(difference, decoded, x, step, rate, turn)
        rooms = {rank: payloads[each] for each, rank in enumerate(self.ranks) if each != place}
        number = self.number(bucket, turn)
        yield self.mailbox.exchange(rooms, dict.fromkeys(self.neighbours, payloads[place]), number)

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`."""
        looks_next = self._under_way and (self._turn + 1) % _EVERY == 0
        super().wait()
        if looks_next:
            for bucket in self.flat.buckets:
                self._before[bucket.index] = bucket.flat[:_SAMPLE].to(torch.float32, copy=True)

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), guards={"grown": sum(guard.grown for guard in self._guards.values())})

    def _value(
        self, rule: MessageRule, arrays: list[torch.Tensor], scalars: Sequence[float], replicas: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns what a rule without `before` encodes of the first elements."""
        if replicas is not None:
            rows = {rank: row[:_SAMPLE] for rank, row in zip(self.ranks, replicas, strict=True)}
            weights = dict(zip(self.ranks, self.weights, strict=True))
            arrays = [*arrays, weighted_sum(rows, weights, torch.empty_like(rows[self.mailbox.rank]))]
        value: torch.Tensor = rule.value(*(each.float() for each in arrays), *scalars)
        return value

    def payloads(self, bucket: Bucket) -> torch.Tensor:
        """Returns the memory of the payloads of all of `ranks`, one row each."""
        if bucket.index not in self._payloads:
            size = self.codec.payload_size(bucket.flat.numel())
            shape = len(self.ranks), size
            self._payloads[bucket.index] = torch.zeros(shape, dtype=torch.uint8, device=bucket.flat.device)
        return self._payloads[bucket.index]

    @property
    def decay(self) -> float | None:
        """See `ModelAlgorithm.decay`."""
        return self._decay

    def noise(self) -> float:
        """Returns the codec's squared error relative to what was encoded, |C(z) - z|^2 / |z|^2, when the guard last looked."""
        return max((guard.noise for guard in self._guards.values()), default=0.0)


class _Guard:
    """Looks now and then how large the differences of a bucket are, and how much of them the codec loses.

    Differences are larger where steps are, as while a learning rate rises. A codec that keeps the part `sqrt(noise)` of their
    length in each round lets them grow to `1 / (1 - sqrt(noise))` steps, over many rounds. But where ranks drift apart gradients
    grow, too. So steps count as far as the learning rate explains them, or as long as they are no longer than the parameters.

    What goes beyond at two looks in a row, and grows between them, diverges; after one large step differences shrink again.

    Attributes:
        noise: the part of a difference's square that the codec lost at the last look.
        grown: looks that found differences larger than they should be.
    """

    def __init__(self, name: str, codec: Codec, remedy: str) -> None:
        self.noise = 0.0
        self.grown = 0
        self._name = name
        self._codec = codec
        self._remedy = remedy
        self._norms, self._sizes, self._steps, self._ratios = _First(), _First(), _First(), _First()
        self._rate = self._step = 0.0
        self._last = math.inf

    def look(
        self,
        difference: torch.Tensor,
        decoded: torch.Tensor,
        parameters: torch.Tensor,
        step: torch.Tensor | None,
        rate: float,
        turn: int,
    ) -> None:
        # waits: a guard looks at few rounds.
        size = float(difference.double().square().sum())
        # waits: a guard looks at few rounds.
        lost = float((decoded.double() - difference.double()).square().sum())
        if not size > 0:
            return
        self.noise = lost / size
        norm, length = size**0.5, 0.0 if step is None else float(step.norm(dtype=torch.float64))
        # The largest ones: differences of before are still there when a learning rate has sunk.
        self._rate, self._step = max(self._rate, rate), max(self._step, length)
        self._norms.add(norm, rate)
        self._sizes.add(float(parameters.norm(dtype=torch.float64)), 0.0)
        if length > 0:
            self._steps.add(length, rate)
            self._ratios.add(norm / length, 0.0)
        held = 1 / (1 - self.noise**0.5) if self.noise < 1 else 0.0
        expected = max(
            self._norms.at(self._rate),
            self._steps.at(self._rate) * held,
            min(self._step * max(self._ratios.at(0.0), held), self._sizes.at(0.0)),
        )
        last, self._last = self._last, math.inf
        if not (self.noise > _LOUD and norm > _GROWTH * expected):
            return
        self.grown += 1
        self._last = norm
        if norm > last:
            raise DivergenceError(
                f"{self._name} diverges: in round {turn} the differences to be sent have the norm {norm:.3g}, expected below "
                f"{_GROWTH * expected:.3g} for steps of up to {self._step:.3g}, and {self._codec!r} loses {self.noise:.2f} of "
                f"their square (alpha^2, expected below {_LOUD}): use more bits, smaller blocks, or {self._remedy}"
            )


class _First:
    """The values of the first looks, and the learning rates at which they were found."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._by_rate: list[float] = []

    def add(self, value: float, rate: float) -> None:
        if len(self._values) < _FIRST:
            self._values.append(value)
            self._by_rate.append(value / rate if rate > 0 else 0.0)

    def at(self, rate: float) -> float:
        """Returns the median, or what it would be at a higher rate; 0 without values."""
        middle = len(self._values) // 2
        return max(sorted(self._values)[middle], sorted(self._by_rate)[middle] * rate) if self._values else 0.0
