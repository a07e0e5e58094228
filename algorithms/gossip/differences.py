"""Encoded differences among neighbours, and the guard that watches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.rounds.mixing import Peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
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
_GROWTH = 8.0  # by how much differences have grown, over their median of the first looks, when they diverge
_FIRST = 4  # looks that make that median


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
        self.peers, self.seed = peers, seed
        self._guards: dict[int, _Guard] = {}
        self._decay: float | None = None
        self._payloads: dict[int, torch.Tensor] = {}
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
            difference, decoded = (torch.cat([vector[span] for span in spans]) for vector in (expected, decoded))
            self._guards[bucket.index].look(difference, decoded, turn)
        rooms = {rank: payloads[each] for each, rank in enumerate(self.ranks) if each != place}
        number = self.number(bucket, turn)
        yield self.mailbox.exchange(rooms, dict.fromkeys(self.neighbours, payloads[place]), number)

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
    """Looks now and then how large the differences of a bucket are, and how much of them the codec loses."""

    def __init__(self, name: str, codec: Codec, remedy: str) -> None:
        self.noise = 0.0
        self._name = name
        self._codec = codec
        self._remedy = remedy
        self._first: list[float] = []

    def look(self, difference: torch.Tensor, decoded: torch.Tensor, turn: int) -> None:
        # waits: a guard looks at few rounds.
        size = float(difference.double().square().sum())
        # waits: a guard looks at few rounds.
        lost = float((decoded.double() - difference.double()).square().sum())
        if not size > 0:
            return
        self.noise = lost / size
        norm = size**0.5
        if len(self._first) < _FIRST:
            self._first.append(norm)
        usual = sorted(self._first)[len(self._first) // 2]
        if self.noise > _LOUD and norm > _GROWTH * usual:
            raise DivergenceError(
                f"{self._name} diverges: in round {turn} the differences to be sent have the norm {norm:.3g}, at first "
                f"{usual:.3g}, and {self._codec!r} loses {self.noise:.2f} of their square (alpha^2, expected below {_LOUD}): use "
                f"more bits, smaller blocks, or {self._remedy}"
            )
