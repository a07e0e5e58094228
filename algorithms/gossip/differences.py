"""Encoded differences among neighbours, and the guard that watches them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, Unpack

import torch

from bagua_kernels.algorithms.gossip.mixing import Peers, check_among, checked_peers, topology_of
from bagua_kernels.algorithms.gossip.node_exchange import Members, members_of
from bagua_kernels.algorithms.models.kind import Kind
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.models.rounds import Rounds, RoundsOptions
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.comm.compressed.layout import own_counts
from bagua_kernels.comm.topology import Topology, weighted_sum
from bagua_kernels.compression import BlockCodec, Codec, encode_rule, fold_seed, from_spec
from bagua_kernels.errors import DivergenceError
from bagua_kernels.rules.messages import MessageRule

T = TypeVar("T")

_SAMPLE = 1 << 16  # elements of a bucket that the guard looks at
_EVERY = 8  # rounds from one look of the guard to the next
_LOUD = 0.75  # squared error, relative to what was encoded, from which on a codec may add more than it takes away
_GROWTH = 8.0  # by how much differences have grown, over what they should be, when they diverge
_FIRST = 4  # looks by whose medians it is known what they should be


@dataclass(frozen=True)
class Neighbourhood:
    """Who sends encoded differences to this rank.

    Attributes:
        codec: encodes differences.
        topology: the mixing matrix, symmetric and the same in all rounds.
        members: ranks, or nodes in two tiers.
        neighbours: to which members this one sends.
        ranks: this member and its neighbours, ascending.
        weights: of `ranks`, in their order.
        seed: of random numbers.
        guards: of all buckets.
    """

    codec: Codec
    topology: Topology
    members: Members
    neighbours: Sequence[int]
    ranks: list[int]
    weights: list[float]
    seed: int
    guards: list[Guard] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This member's number."""
        return self.members.rank

    @property
    def place(self) -> int:
        """Of this member in `ranks`."""
        return self.ranks.index(self.rank)

    def by_rank(self, values: Iterable[T]) -> dict[int, T]:
        """Returns values of `ranks`, by rank."""
        return dict(zip(self.ranks, values, strict=True))


class Differences(RoundAlgorithm):
    """Base of the algorithms that send encoded differences to all neighbours of one symmetric topology.

    In two tiers the topology is one of nodes. The ranks of a node take their exact mean first, and encode the same. Each of them
    exchanges a part of the payload with other nodes.

    Attributes:
        codec: encodes differences.
        remedy: what else to use where an algorithm diverges.
    """

    needs_even_nodes = True
    refuses_verification = ""
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
        self._guards: list[Guard] = []
        super().__init__(module, optimizer, **options)

    def kind(self, name: str, parameter: torch.Tensor) -> Kind:
        """See `ModelAlgorithm.kind`: whole blocks of the codec."""
        return Kind(self.codec.block)

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        if double := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
            return f"codecs take float32, float16 and bfloat16, and parameter {double[0]!r} is float64: convert the module before"
        return super()._misfit(trained)

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `RoundAlgorithm.loop_for`."""
        members = members_of(local)
        topology = topology_of(self.peers, members.size)
        self._check(local, members, topology)
        if topology.period != 1:
            raise ValueError(
                f"{type(self).__name__} keeps what its neighbours have, and expects one matrix for all steps, got "
                f"{topology!r}: use a static topology such as a ring"
            )
        weights = {rank: weight for rank, weight in topology.weights(members.rank).items() if weight}
        if members.rank not in weights:
            raise ValueError(
                f"{type(self).__name__} expects each rank to keep a part of its own, got {topology!r}: use Lazy"
            )
        neighbours, ranks = topology.neighbours_in(members.rank), list(weights)
        self._neighbourhood = Neighbourhood(
            self.codec, topology, members, neighbours, ranks, list(weights.values()), self.seed, self._guards
        )
        # Ranks of a node wait for each other on their training threads: one that is at a call hears of the round before.
        of_nodes = members.size < local.mailbox.size
        return self.rounds_with(local, RoundsOptions(several=of_nodes, announces=of_nodes, decay=topology.rho))

    def _check(self, local: LocalModel, members: Members, topology: Topology) -> None:
        """Compares topologies of all ranks, or of those of one place on all nodes; collective."""
        if members.size == local.mailbox.size:
            topology.check(local.communicator, "symmetric")
            return
        check_among(local.communicator, members.peers, topology, "symmetric")

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), guards={"grown": sum(guard.grown for guard in self._guards)})

    def noise(self) -> float:
        """Returns the codec's squared error relative to what was encoded, |C(z) - z|^2 / |z|^2, when the guard last looked."""
        return max((guard.noise for guard in self._guards), default=0.0)


class DifferenceRound(Round):
    """Encodes differences of a bucket, and exchanges them with all neighbours.

    Attributes:
        hood: the neighbours.
    """

    def __init__(self, local: LocalModel, bucket: Bucket, hood: Neighbourhood, remedy: str) -> None:
        """Begins before the first round.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            hood: the neighbours.
            remedy: what else to use where an algorithm diverges.
        """
        super().__init__(local, bucket)
        self.hood, self._guard = hood, Guard(local.title, hood.codec, remedy)
        hood.guards.append(self._guard)
        self._payloads: torch.Tensor | None = None
        # The first elements before the step after which the guard looks.
        self._before: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if isinstance(hood.codec, BlockCodec):
            counts = own_counts(bucket.own, bucket.flat.numel(), hood.codec.block)
            # waits: once for each bucket.
            self._counts = counts.to(bucket.flat.device)

    def encode(
        self,
        number: int,
        rule: MessageRule,
        arrays: Sequence[torch.Tensor],
        scalars: Sequence[float] = (),
        replicas: torch.Tensor | None = None,
    ) -> Iterator[Work]:
        """Encodes what a rule makes of vectors, and exchanges it; afterwards `payloads` has those of all of the neighbourhood.

        Args:
            number: of the round.
            rule: see `bagua_kernels.compression.encode_rule`, as for the other arguments.
            arrays: of the rule, the parameters first.
            scalars: of the rule.
            replicas: of which the weighted sum is the rule's last array, if there are any.
        """
        hood, flat, memory = self.hood, self.bucket.flat, self._memory
        hood.members.average(flat)
        looks = number % _EVERY == 0
        # Of a large bucket the first elements show as much.
        expected = self._value(rule, [each[:_SAMPLE] for each in arrays], scalars, replicas) if looks else None
        # Some rules write new parameters.
        now = flat[:_SAMPLE].to(torch.float32, copy=True) if looks else flat
        seed = fold_seed(hood.seed, number, self.bucket.index, hood.rank)
        options: dict[str, Any] = {"replicas": replicas, "weights": None if replicas is None else hood.weights}
        out = memory[hood.place, : hood.codec.payload_size(flat.numel())]
        encode_rule(hood.codec, rule, arrays, scalars, seed=seed, out=out, counts=self._counts, **options)
        if expected is not None:
            self._look(expected, hood.codec.decode(out, torch.empty_like(flat, dtype=torch.float32)), now, number)
        rooms = {rank: memory[place] for place, rank in enumerate(hood.ranks) if place != hood.place}
        yield from hood.members.exchange(rooms, hood.neighbours, memory[hood.place], self.exchange_number(number))

    def _look(self, expected: torch.Tensor, decoded: torch.Tensor, now: torch.Tensor, number: int) -> None:
        """Lets the guard look at the first elements of what was encoded."""
        # Padding between parameters holds what nobody reads.
        spans = [slice(span.start, min(span.stop, _SAMPLE)) for span in self.bucket.own if span.start < _SAMPLE]
        difference, decoded, x = (torch.cat([vector[span] for span in spans]) for vector in (expected, decoded, now))
        before, self._before = self._before, None
        step = None if before is None else x - torch.cat([before[span] for span in spans])
        # waits: a guard looks at few rounds.
        rate = max(float(group.get("lr", 1.0)) for group in self.local.optimizer.param_groups)
        self._guard.look(difference, decoded, x, step, rate, number)

    def placed(self, number: int) -> None:
        """See `Round.placed`."""
        if (number + 1) % _EVERY == 0:
            self._before = self.bucket.flat[:_SAMPLE].to(torch.float32, copy=True)

    def _value(
        self, rule: MessageRule, arrays: list[torch.Tensor], scalars: Sequence[float], replicas: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns what a rule without `before` encodes of the first elements."""
        hood = self.hood
        if replicas is not None:
            rows = hood.by_rank(row[:_SAMPLE] for row in replicas)
            weights = hood.by_rank(hood.weights)
            arrays = [*arrays, weighted_sum(rows, weights, torch.empty_like(rows[hood.rank]))]
        value: torch.Tensor = rule.value(*(each.float() for each in arrays), *scalars)
        return value

    @property
    def payloads(self) -> torch.Tensor:
        """The memory of the payloads of all of the neighbourhood, one row each."""
        rows = self._memory[:, : self.hood.codec.payload_size(self.bucket.flat.numel())]
        return rows if isinstance(self.hood.codec, BlockCodec) else rows.contiguous()

    @property
    def _memory(self) -> torch.Tensor:
        if self._payloads is None:
            flat, hood = self.bucket.flat, self.hood
            shape = len(hood.ranks), hood.members.padded(hood.codec.payload_size(flat.numel()))
            self._payloads = torch.zeros(shape, dtype=torch.uint8, device=flat.device)
        return self._payloads


class Guard:
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
        """Begins without looks.

        Args:
            name: of the algorithm.
            codec: of the differences.
            remedy: what else to use where it diverges.
        """
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
        """Looks at what was encoded in a round.

        Args:
            difference: that was to be encoded, float32.
            decoded: of its payload.
            parameters: at the same places.
            step: that they took since the last round; None if that is not known.
            rate: the learning rate of the step.
            turn: number of the round.

        Raises:
            DivergenceError: differences grow beyond what steps explain.
        """
        # waits: a guard looks at few rounds.
        size = float(difference.double().square().sum())
        # waits: a guard looks at few rounds.
        lost = float((decoded.double() - difference.double()).square().sum())
        if not size > 0:
            return
        self.noise = lost / size
        norm, length = size**0.5, 0.0 if step is None else float(step.norm(dtype=torch.float64))
        # The largest ones: earlier differences are still there when a learning rate has sunk.
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
