"""One gossip step of a bucket: what neighbours send is added up with the weights of a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from bagua_kernels.algorithms.rounds.flat_parameters import FlatParameters
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Work
from bagua_kernels.comm.topology import (
    Complete,
    Lazy,
    Needs,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    StaticExponential,
    Topology,
    Torus,
    weighted_sum,
)

Peers = str | Topology

_NAMED: dict[str, Callable[[int], Topology]] = {
    "all": Complete,
    "shift_one": ShiftOne,
    "ring": Ring,
    "torus": Torus,
    "exponential": StaticExponential,
    "one_peer_exponential": OnePeerExponential,
    "random": lambda size: RandomMatching(size, seed=0),
    "lazy_ring": lambda size: Lazy(Ring(size)),
}


def topology_of(peers: Peers, size: int) -> Topology:
    """Returns the topology that a name stands for, or the given one.

    Args:
        peers: "all", "shift_one", "ring", "torus", "exponential", "one_peer_exponential", "random", "lazy_ring", or a topology.
        size: the number of ranks.

    Raises:
        TypeError: it is neither a name nor a topology.
        ValueError: there is no such name.
    """
    if isinstance(peers, Topology):
        return peers
    if not isinstance(peers, str):
        raise TypeError(f"expected peers to be a name or a Topology, got {peers!r}")
    if peers not in _NAMED:
        raise ValueError(f"expected peers to be one of {', '.join(sorted(_NAMED))}, got {peers!r}")
    return _NAMED[peers](size)


class Mixer:
    """Mixes vectors beside buckets with those of neighbours.

    Keeps one vector for each neighbour that sends at a time.

    Attributes:
        topology: the mixing matrices.
        communicators: that it has opened.
    """

    def __init__(
        self, mailbox: Mailbox, topology: Topology, flat: FlatParameters, ranks: Sequence[int] | None = None
    ) -> None:
        """Mixes over some ranks of a mailbox.

        Args:
            mailbox: carries the vectors.
            topology: its rank i is rank `ranks[i]` of the mailbox.
            flat: the parameters beside which the vectors are.
            ranks: all ranks in order if None.
        """
        self.mailbox = mailbox
        self.topology = topology
        self.communicators: list[Communicator] = []
        self._ranks = list(range(mailbox.size)) if ranks is None else list(ranks)
        self._rank = self._ranks.index(mailbox.rank)
        self._flat = flat
        self._rooms: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._decay: float | None = None
        self._disagreement: dict[int, torch.Tensor] = {}

    def check(self, communicator: Communicator, needs: Needs) -> None:
        """Calls `Topology.check`; collective.

        Args:
            communicator: of all ranks of the mailbox.
            needs: as for `Topology.check`.
        """
        self.topology.check(communicator, needs)

    @torch.no_grad()
    def mix(
        self,
        bucket: Bucket,
        x: torch.Tensor,
        out: torch.Tensor,
        turn: int,
        number: int,
        scalar: torch.Tensor | None = None,
    ) -> Iterator[Work]:
        """Writes sum_j W_ij x_j to `out`; yields the exchange that it waits for.

        Terms are added in ascending rank order, in float32 for parameters of half precision. If all weights that are not zero
        are 1/n, the plain sum is divided by n (see `weighted_sum`).

        Args:
            bucket: beside which the vectors are.
            x: this rank's vector, which stays as it is until the exchange has ended.
            out: shape of `x`, another memory.
            turn: number of the matrix W.
            number: of the exchange, the same on all ranks.
            scalar: one float64 number that is mixed in the same way, in place; not sent if None.
        """
        rank, ranks = self._rank, self._ranks
        heard, told = self.topology.neighbours_in(rank, turn), self.topology.neighbours_out(rank, turn)
        values = {peer: self._room(bucket, place, x) for place, peer in enumerate(heard)}
        rooms = {ranks[peer]: room for peer, room in values.items()}
        yield self.mailbox.exchange(rooms, {ranks[peer]: x for peer in told}, 2 * number)
        weights = self.topology.weights(rank, turn)
        if heard:
            self._disagreement[bucket.index] = _distance(x, values[heard[0]])
        weighted_sum({**values, rank: x}, weights, out)
        if scalar is not None:
            numbers = {peer: torch.empty_like(scalar) for peer in heard}
            rooms = {ranks[peer]: room for peer, room in numbers.items()}
            yield self.mailbox.exchange(rooms, {ranks[peer]: scalar for peer in told}, 2 * number + 1)
            numbers[rank] = scalar
            # On the host, in one order: a GPU's own product and sum may be rounded once.
            scalar.fill_(sum(float(numbers[peer]) * weight for peer, weight in weights.items() if weight))

    def disagreement(self) -> float:
        """Returns the root mean square difference between a parameter here and at a neighbour, in the last exchange."""
        if not self._disagreement:
            return 0.0
        squares = sum(float(each) for each in self._disagreement.values())
        elements = sum(sum(span.stop - span.start for span in bucket.spans) for bucket in self._flat.buckets)
        return float((squares / max(1, elements)) ** 0.5)

    @property
    def decay(self) -> float:
        """The factor by which a period of the topology shrinks differences at worst."""
        if self._decay is None:
            self._decay = self.topology.rho()
        return self._decay

    def _room(self, bucket: Bucket, place: int, like: torch.Tensor) -> torch.Tensor:
        key = (bucket.index, place, like.dtype)
        if key not in self._rooms:
            self._rooms[key] = torch.zeros_like(like)
        return self._rooms[key]


def root_mean_square(parts: Iterable[torch.Tensor]) -> float:
    """Returns the root of the mean square of all elements of some tensors; 0 without elements."""
    squares, elements = 0.0, 0
    for part in parts:
        squares += float(part.double().square().sum())
        elements += part.numel()
    return float((squares / max(1, elements)) ** 0.5)


def _distance(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # A sample: of a large bucket every 64th element shows as much, and costs no pass over memory.
    step = 1 if x.numel() < 1 << 16 else 64
    difference = x[::step].double() - other[::step].double()
    return (difference.square().sum() * step).cpu()
