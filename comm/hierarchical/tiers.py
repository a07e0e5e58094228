"""The communicators of two tiers: of the ranks of a node, and of the owners of shards on all nodes."""

from __future__ import annotations

from collections.abc import Iterator

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.hierarchical.nodes import Nodes


class Tiers:
    """What vectors of any size and dtype are reduced by: the same connections serve all of them.

    A vector is cut into S shards, S being the ranks of the largest node. On a node of L ranks, local rank s mod L owns shard s.

    What precedes the exchange between nodes and what follows it have a communicator each. Operations of both kinds may be under
    way at a time, in another order on other ranks.

    Attributes:
        nodes: the ranks of each node.
        members: the ranks of this rank's node.
        local: the communicator of this rank's node, by which shards are reduced onto their owners.
        shared: another one of the same ranks, by which owners share their shards.
        owners: for each shard that this rank owns, the communicator of its owners; empty with one node.
    """

    def __init__(self, communicator: Communicator, nodes: Nodes) -> None:
        """Connects the ranks; every rank calls it, with the same nodes.

        Args:
            communicator: all ranks; must stay open for as long as this is used.
            nodes: which ranks share a node.

        Raises:
            CommunicationError: a rank was lost or did not take part in time.
        """
        self.nodes = nodes
        self.members = nodes.members[nodes.node_of(communicator.rank)]
        self.owners: dict[int, Communicator] = {}
        self._all: list[Communicator] = []
        try:
            self.local = self._split(communicator, self.members)
            self.shared = self._split(communicator, self.members)
            for shard in range(nodes.largest if len(nodes.members) > 1 else 0):
                owners = communicator.split(nodes.owners(shard))
                if owners is not None:
                    self.owners[shard] = owners
                    self._all.append(owners)
        except BaseException:
            self.abort()
            raise

    def _split(self, communicator: Communicator, ranks: tuple[int, ...]) -> Communicator:
        made = communicator.split(ranks)
        assert made is not None
        self._all.append(made)
        return made

    def __iter__(self) -> Iterator[Communicator]:
        """Yields all communicators."""
        return iter(self._all)

    @property
    def scatters(self) -> bool:
        """True if each rank of this node owns one shard, so that reduce-scatter and all-gather serve."""
        return len(self.members) == self.nodes.largest > 1

    @property
    def bytes_across(self) -> int:
        """Payload bytes that this rank has sent to other nodes."""
        return sum(communicator.bytes_sent for communicator in self.owners.values())

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent, inside its node and to others."""
        return sum(communicator.bytes_sent for communicator in self._all)

    def note(self) -> str:
        """Returns which ranks the communicators connect: rank numbers in their errors are their own."""
        owners = [self.nodes.owners(shard) for shard in self.owners]
        return f"ranks of this node: {list(self.members)}; owners of the shards of this rank: {owners}"

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`."""
        for communicator in self._all:
            communicator.set_timeout(seconds)

    def close(self, limit: float | None = None) -> None:
        """Frees the connections; every rank calls it, as often as it likes."""
        for communicator in self._all:
            communicator.close(limit)

    def abort(self, reason: str = "it was aborted") -> None:
        """Gives up: every later call raises `CommunicationError` here, and others see this rank left."""
        for communicator in self._all:
            communicator.abort(reason)
