"""One gossip step of a bucket: what neighbours send is added up with the weights of a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.models.rounds import RoundsOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Work
from bagua_kernels.comm.topology import (
    Complete,
    Graph,
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
    whole,
)
from bagua_kernels.launchers import elementwise
from bagua_kernels.quotient import divide_
from bagua_kernels.rules import mixing
from bagua_kernels.streams import event_behind
from bagua_kernels.suggestions import did_you_mean

Peers = str | Topology
_SAMPLE = 1 << 15  # elements of a bucket whose differences are measured

_NAMED: dict[str, Callable[[int], Topology]] = {
    "all": Complete,
    "shift_one": ShiftOne,
    "ring": Ring,
    "torus": Torus,
    "exponential": StaticExponential,
    "one_peer_exponential": OnePeerExponential,
    "random": lambda size: RandomMatching(size, seed=0),
    "lazy_ring": lambda size: Lazy(Ring(size)),
    "chain": lambda size: Graph(size, [(rank, rank + 1) for rank in range(size - 1)]),
}


def topology_of(peers: Peers, size: int) -> Topology:
    """Returns the topology that a name stands for, or the given one.

    Args:
        peers: "all", "shift_one", "ring", "torus", "exponential", "one_peer_exponential", "random", "lazy_ring", "chain", or a
            topology.
        size: the number of ranks.

    Raises:
        TypeError: it is neither a name nor a topology.
        ValueError: there is no such name.
    """
    found = checked_peers(peers)
    return _NAMED[found](size) if isinstance(found, str) else found


def checked_peers(peers: Peers) -> Peers:
    """Returns what is given; raises as `topology_of` does. One rank alone, which has no topology, thus sees a misspelled name."""
    if not isinstance(peers, str | Topology):
        raise TypeError(f"expected peers to be a name or a Topology, got {peers!r}")
    if isinstance(peers, str) and peers not in _NAMED:
        raise ValueError(
            f"expected peers to be one of {', '.join(sorted(_NAMED))}, got {peers!r}{did_you_mean(peers, _NAMED)}"
        )
    return peers


def check_among(communicator: Communicator, ranks: Sequence[int], topology: Topology, needs: Needs) -> None:
    """Compares topologies of some ranks only; collective over all, each of which gives the ranks that it belongs to.

    Raises:
        ValueError: as `Topology.check`.
    """
    among = communicator.split(ranks)
    assert among is not None
    with among:
        topology.check(among, needs)


@dataclass(frozen=True)
class Terms:
    """What a gossip step adds up.

    Terms are added in ascending rank order, in float32 for parameters of half precision, as `weighted_sum` does it.

    Attributes:
        values: by rank.
        weights: by rank, none of them zero.
        own: this rank.
    """

    values: Mapping[int, torch.Tensor]
    weights: Mapping[int, float]
    own: int

    def mix(self) -> None:
        """Replaces this rank's value by the sum."""
        own = self.values[self.own]
        if self._fits and self.own in self.weights:
            elementwise.apply(
                mixing.mixed(len(self.weights), [*self.weights].index(self.own)), self._arrays, self._scalars
            )
        else:
            own.copy_(weighted_sum(self.values, self.weights, torch.empty_like(own)))

    def flow(self, correction: torch.Tensor, x: torch.Tensor) -> None:
        """Subtracts sum_j W_ij (y_j - y_i) from `correction`, and then `correction` from `x`.

        The terms of a pair of ranks are opposite, bit for bit. So corrections of all ranks sum to zero but for the rounding
        of their own sums.
        """
        factors, divisor = whole(self.weights)
        own, others = self.values[self.own], {peer: w for peer, w in factors.items() if peer != self.own}
        if self._fits and others:
            arrays = [*(self.values[peer] for peer in others), own, correction, x]
            elementwise.apply(mixing.flows(len(others)), arrays, [*others.values(), float(divisor)])
        else:
            total = torch.zeros_like(correction)
            for peer, factor in others.items():
                total.add_((self.values[peer] - own).mul_(factor))
            correction.sub_(divide_(total, divisor))
            x.sub_(correction)

    @property
    def _fits(self) -> bool:
        # Triton has no kernels for float64.
        double = self.values[self.own].dtype == torch.float64
        return 2 <= len(self.weights) <= mixing.MOST and not double

    @property
    def _arrays(self) -> list[torch.Tensor]:
        return [self.values[peer] for peer in self.weights]

    @property
    def _scalars(self) -> list[float]:
        weights, divisor = whole(self.weights)
        return [*weights.values(), float(divisor)]


class Mixing:
    """Who mixes with whom, and with which weights.

    Attributes:
        mailbox: carries the vectors.
        topology: the mixing matrices.
        ranks: of the mailbox; rank i of the topology is `ranks[i]`.
        rank: this rank's number in the topology.
    """

    def __init__(self, mailbox: Mailbox, topology: Topology, ranks: Sequence[int] | None = None) -> None:
        """Mixes over some ranks of a mailbox.

        Args:
            mailbox: carries the vectors.
            topology: its rank i is rank `ranks[i]` of the mailbox.
            ranks: all ranks in order if None.
        """
        self.mailbox, self.topology = mailbox, topology
        self.ranks = list(range(mailbox.size)) if ranks is None else list(ranks)
        self.rank = self.ranks.index(mailbox.rank)

    def check(self, communicator: Communicator, needs: Needs) -> None:
        """Calls `Topology.check`; collective.

        Args:
            communicator: of all ranks of the mailbox.
            needs: as for `Topology.check`.
        """
        self.topology.check(communicator, needs)

    def options(self) -> RoundsOptions:
        """Returns how rounds take place."""
        return RoundsOptions(decay=self.topology.rho)

    def mixer(self) -> Mixer:
        """Returns what mixes one vector."""
        return Mixer(self)


class Mixer:
    """Mixes one vector with those of neighbours. Keeps one for each neighbour that sends at a time."""

    def __init__(self, mixing: Mixing) -> None:
        """Begins without memory for the vectors of neighbours."""
        self.mixing = mixing
        self._rooms: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._square: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def exchange(self, x: torch.Tensor, turn: int, number: int, scalar: torch.Tensor | None = None) -> Iterator[Work]:
        """Sends a vector to the neighbours of a round and receives theirs; yields what it waits for.

        Args:
            x: this rank's vector, which stays as it is until the exchange has ended.
            turn: number of the matrix W.
            number: of the exchange, the same on all ranks.
            scalar: one float64 number, which is replaced by the weighted sum of all; not sent if None.
        """
        rank, ranks, mailbox = self.mixing.rank, self.mixing.ranks, self.mixing.mailbox
        topology = self.mixing.topology
        heard, told = topology.neighbours_in(rank, turn), topology.neighbours_out(rank, turn)
        values = {peer: self._room(place, x) for place, peer in enumerate(heard)}
        rooms = {ranks[peer]: room for peer, room in values.items()}
        yield mailbox.exchange(rooms, {ranks[peer]: x for peer in told}, 2 * number)
        self._received = values
        if scalar is not None:
            numbers = {peer: torch.empty_like(scalar) for peer in heard}
            rooms = {ranks[peer]: room for peer, room in numbers.items()}
            yield mailbox.exchange(rooms, {ranks[peer]: scalar for peer in told}, 2 * number + 1)
            numbers[rank] = scalar
            weights = topology.weights(rank, turn)
            # On the host, in one order: a GPU's own product and sum may be rounded once.
            # waits: once a round, on a communication thread, where weights are pushed.
            scalar.fill_(sum(float(numbers[peer]) * weight for peer, weight in weights.items() if weight))

    def terms(self, x: torch.Tensor, turn: int) -> Terms:
        """Returns what is added up after `exchange` of the same arguments."""
        received, rank = self._received, self.mixing.rank
        if received:
            square = _difference(x, next(iter(received.values())))
            self._square = square, event_behind(square)
        weights = self.mixing.topology.weights(rank, turn)
        return Terms({**received, rank: x}, {peer: w for peer, w in weights.items() if w}, rank)

    def disagreement(self) -> tuple[float, int] | None:
        """See `Round.disagreement`: the mean square difference from a neighbour, in the last exchange."""
        if self._square is None:
            return None
        square, event = self._square
        if event is not None:
            event.synchronize()
        # waits: for a statistic that the caller asks for.
        return float(square), 1

    def _room(self, place: int, like: torch.Tensor) -> torch.Tensor:
        key = (place, like.dtype)
        if key not in self._rooms:
            self._rooms[key] = torch.zeros_like(like)
        return self._rooms[key]


class MixerRound(Round):
    """Base of the rounds that mix a vector.

    Attributes:
        mixer: mixes it.
    """

    def __init__(self, local: LocalModel, bucket: Bucket, mixer: Mixer) -> None:
        """Begins before the first round.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            mixer: of the vector.
        """
        super().__init__(local, bucket)
        self.mixer = mixer

    def disagreement(self) -> tuple[float, int] | None:
        """See `Round.disagreement`."""
        return self.mixer.disagreement()


def sum_of_squares(parts: Iterable[torch.Tensor]) -> tuple[float, int]:
    """Returns the sum of the squares of all elements of some tensors, and the number of these."""
    squares, elements = 0.0, 0
    for part in parts:
        # waits: for statistics.
        squares += float(part.double().square().sum())
        elements += part.numel()
    return squares, elements


def _difference(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the mean square of differences, of the first elements only: that costs no pass over memory."""
    return (x[:_SAMPLE].float() - other[:_SAMPLE].float()).square().mean()
