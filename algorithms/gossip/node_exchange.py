"""How vectors travel among ranks, or among nodes whose ranks all have the same."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.comm import Communicator, Mailbox, ReduceOp, Work
from bagua_kernels.comm.hierarchical import TieredCommunicator

_UNIT = 16  # bytes, of which each part has a multiple


class Members(abc.ABC):
    """The members of a graph, by number: ranks or nodes.

    Attributes:
        rank: this member's number.
        size: the number of members.
        peers: for each member, the rank with which this one exchanges.
    """

    rank: int
    size: int
    peers: Sequence[int]

    @abc.abstractmethod
    def exchange(
        self, rooms: Mapping[int, torch.Tensor], sent: Iterable[int], payload: torch.Tensor, number: int
    ) -> Iterator[Work]:
        """Sends a payload to some members and receives theirs; yields what it waits for.

        Args:
            rooms: for each member to hear from, the row that receives its payload, of `padded` bytes.
            sent: the members that get this one's.
            payload: of this member, of `padded` bytes.
            number: of the exchange, the same on all ranks.
        """

    @abc.abstractmethod
    def padded(self, nbytes: int) -> int:
        """Returns the bytes of a row for a payload of so many."""

    def average(self, vector: torch.Tensor) -> None:  # noqa: B027
        """Replaces a vector of this rank by that of its member; blocks."""

    def most(self, number: int) -> int:
        """Returns the greatest number of this member's ranks; blocks."""
        return number


class RankMembers(Members):
    """Each rank is a member."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.rank, self.size, self.peers = mailbox.rank, mailbox.size, range(mailbox.size)

    def exchange(
        self, rooms: Mapping[int, torch.Tensor], sent: Iterable[int], payload: torch.Tensor, number: int
    ) -> Iterator[Work]:
        """See `Members.exchange`."""
        yield self._mailbox.exchange(rooms, dict.fromkeys(sent, payload), number)

    def padded(self, nbytes: int) -> int:
        """See `Members.padded`."""
        return nbytes


class NodeMembers(Members):
    """Each node is a member, whose ranks have the same vectors, bit for bit.

    Each rank of a node exchanges one part of a payload with the rank of its place on other nodes. Then all ranks of the node get
    all parts.
    """

    def __init__(self, mailbox: Mailbox, communicator: TieredCommunicator, node: Communicator) -> None:
        """Makes members of nodes.

        Args:
            mailbox: of all ranks.
            communicator: of all ranks, with as many on each node. By it goes what precedes exchanges on the training thread.
            node: of this rank's node, for exchanges alone: some may be under way on one rank and not on another.
        """
        self._mailbox, self._communicator, self._node = mailbox, communicator, node
        nodes = communicator.nodes.members
        self.rank = next(number for number, ranks in enumerate(nodes) if mailbox.rank in ranks)
        self.size = len(nodes)
        self.peers = [ranks[node.rank] for ranks in nodes]

    def padded(self, nbytes: int) -> int:
        """See `Members.padded`: parts are equally long."""
        unit = _UNIT * self._node.size
        return -(-nbytes // unit) * unit

    def exchange(
        self, rooms: Mapping[int, torch.Tensor], sent: Iterable[int], payload: torch.Tensor, number: int
    ) -> Iterator[Work]:
        """See `Members.exchange`."""
        size, place = self._node.size, self._node.rank
        part = payload.view(size, -1)[place]
        received = payload.new_empty(len(rooms), part.numel())
        outputs = {self.peers[member]: row for member, row in zip(rooms, received, strict=True)}
        yield self._mailbox.exchange(outputs, {self.peers[member]: part for member in sent}, number)
        parts = payload.new_empty(size, len(rooms), part.numel())
        yield self._node.all_gather(parts, received)
        for row, room in enumerate(rooms.values()):
            room.view(size, -1).copy_(parts[:, row])

    def average(self, vector: torch.Tensor) -> None:
        """See `Members.average`: the mean of the node's ranks."""
        # waits: for ranks of this node, before what they have in common is encoded.
        self._communicator.all_reduce_inside(vector).wait()

    def most(self, number: int) -> int:
        """See `Members.most`."""
        # waits: as `average`.
        found = torch.tensor([number], device=self._node.device)
        # waits: as `average`.
        self._communicator.all_reduce_inside(found, ReduceOp.MAX).wait()
        # waits: as `average`.
        return int(found)


def members_of(local: LocalModel) -> Members:
    """Returns nodes where the communicator has two tiers and nodes have equal numbers of ranks, else ranks; collective.

    Args:
        local: this rank's model.
    """
    communicator = local.communicator
    if not isinstance(communicator, TieredCommunicator) or not communicator.nodes.even:
        return RankMembers(local.mailbox)
    own = communicator.nodes.members[communicator.nodes.node_of(communicator.rank)]
    return NodeMembers(local.mailbox, communicator, local.connect(own))
