"""Encoded differences among neighbours, and the guard that watches them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.rounds.mixing import Peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Work
from bagua_kernels.comm.compressed.layout import own_counts
from bagua_kernels.comm.topology import Topology
from bagua_kernels.compression import BlockCodec, Codec, fold_seed, from_spec
from bagua_kernels.errors import DivergenceError

_EVERY = 8  # rounds from one look of the guard to the next
_LOUD = 0.75  # squared error, relative to what was encoded, from which on a codec may add more than it takes away
_GROWTH = 8.0  # by how much differences have grown, over their median of the first looks, when they diverge
_FIRST = 4  # looks that make that median


class Differences(RoundAlgorithm):
    """Base of the algorithms that send encoded differences to all neighbours of one symmetric topology.

    A subclass has `difference`, `apply` and `merge`.

    Attributes:
        codec: encodes differences.
        factor: by which differences are multiplied before they are encoded.
        topology: the mixing matrix.
    """

    factor = 1.0
    keeps_float64 = False

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
        self.alignment = self.codec.block
        self._guards: dict[int, _Guard] = {}
        self._decay: float | None = None
        self._payloads: dict[tuple[int, int], torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor] = {}
        super().__init__(module, optimizer, **options)

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
        self.weights = self.topology.weights(mailbox.rank)
        for bucket in self.flat.buckets:
            self._guards[bucket.index] = _Guard(type(self).__name__, self.codec)
            if isinstance(self.codec, BlockCodec):
                counts = own_counts(bucket.own, bucket.flat.numel(), self.codec.block)
                self._counts[bucket.index] = counts.to(bucket.flat.device)

    def sent(self, bucket: Bucket, difference: torch.Tensor, turn: int) -> Iterator[Work]:
        """Encodes a difference and exchanges it; afterwards `payload` has those of this rank and of its neighbours.

        Args:
            bucket: whose difference it is.
            difference: float32, like `bucket.flat`; multiplied by `factor`.
            turn: number of the round.
        """
        rank = self.mailbox.rank
        if self.factor != 1.0:
            difference.mul_(self.factor)
        own = self.payload(bucket, rank)
        seed = fold_seed(self.seed, turn, bucket.index, rank)
        if isinstance(self.codec, BlockCodec):
            self.codec.encode(difference, seed=seed, out=own, counts=self._counts[bucket.index])
        else:
            self.codec.encode(difference, seed=seed, out=own)
        if turn % _EVERY == 0:
            self._guards[bucket.index].look(
                difference, self.codec.decode(own, torch.empty_like(difference)), bucket, turn
            )
        rooms = {peer: self.payload(bucket, peer) for peer in self.neighbours}
        yield self.mailbox.exchange(rooms, dict.fromkeys(self.neighbours, own), self.number(bucket, turn))

    def payload(self, bucket: Bucket, rank: int) -> torch.Tensor:
        """Returns the memory of a rank's payload."""
        key = (bucket.index, rank)
        if key not in self._payloads:
            size = self.codec.payload_size(bucket.flat.numel())
            self._payloads[key] = torch.zeros(size, dtype=torch.uint8, device=bucket.flat.device)
        return self._payloads[key]

    def weighted_payloads(self, bucket: Bucket, out: torch.Tensor, work: torch.Tensor) -> None:
        """Writes sum_j W_ij q_j over this rank and its neighbours to `out`, in the order of `weighted_sum`.

        Args:
            bucket: whose payloads have arrived.
            out: float32, like `bucket.flat`.
            work: another vector like it.
        """
        weights = {rank: weight for rank, weight in self.weights.items() if weight}
        mean = all(weight == 1 / len(weights) for weight in weights.values())
        for place, (rank, weight) in enumerate(weights.items()):
            decoded = self.codec.decode(self.payload(bucket, rank), work if place else out)
            if not mean:
                decoded.mul_(weight)
            if place:
                out.add_(decoded)
        if mean:
            out.div_(len(weights))

    @property
    def decay(self) -> float | None:
        """See `ModelAlgorithm.decay`."""
        return self._decay

    def noise(self) -> float:
        """Returns the codec's squared error relative to what was encoded, |C(z) - z|^2 / |z|^2, when the guard last looked."""
        return max((guard.noise for guard in self._guards.values()), default=0.0)


class _Guard:
    """Looks now and then how large the differences of a bucket are, and how much of them the codec loses."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.noise = 0.0
        self._name = name
        self._codec = codec
        self._first: list[float] = []

    def look(self, difference: torch.Tensor, decoded: torch.Tensor, bucket: Bucket, turn: int) -> None:
        squares = [torch.zeros((), dtype=torch.float64, device=difference.device) for _ in range(2)]
        for span in bucket.own:
            squares[0] += difference[span].double().square().sum()
            squares[1] += (decoded[span].double() - difference[span].double()).square().sum()
        size, lost = (float(each) for each in squares)
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
                "more bits, smaller blocks, or Choco, which scales what it sends"
            )
