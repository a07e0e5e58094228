"""A gossip step between nodes: exact means inside each node, and a shard of the bucket for each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua_kernels.algorithms.gossip.mixing import Mixer, Mixing, Peers, Terms, check_among, topology_of
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.rounds import RoundsOptions
from bagua_kernels.comm import Communicator, Nodes, ReduceOp, Work
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.comm.topology import Needs, Topology
from bagua_kernels.comm.work import FINISHED


def mixing_of(local: LocalModel, peers: Peers) -> Mixing:
    """Returns who mixes with whom: ranks, or nodes where the communicator has two tiers; collective.

    A topology of as many ranks as there are stays one of ranks.

    Args:
        local: this rank's model.
        peers: as for `topology_of`.
    """
    communicator = local.communicator
    of_ranks = isinstance(peers, Topology) and peers.size == communicator.size
    if not isinstance(communicator, TieredCommunicator) or of_ranks:
        return Mixing(local.mailbox, topology_of(peers, local.mailbox.size))
    return ShardedMixing(local, peers, communicator.nodes)


class ShardedMixing(Mixing):
    """Mixes over nodes.

    Attributes:
        node: the communicator of this rank's node.
    """

    def __init__(self, local: LocalModel, peers: Peers, nodes: Nodes) -> None:
        """Connects the ranks inside nodes, which all have as many; collective.

        Raises:
            ValueError: the topology has not the number of nodes.
        """
        own = nodes.members[nodes.node_of(local.communicator.rank)]
        place = own.index(local.communicator.rank)
        ranks = [node[place] for node in nodes.members]
        super().__init__(local.mailbox, topology_of(peers, len(ranks)), ranks=ranks)
        self.node = local.connect(own)

    def options(self) -> RoundsOptions:
        """See `Mixing.options`: collectives inside nodes run one after the other on all ranks."""
        return RoundsOptions(several=True, decay=self.topology.rho)

    def check(self, communicator: Communicator, needs: Needs) -> None:
        """See `Mixing.check`; ranks of one place on all nodes compare theirs."""
        check_among(communicator, self.ranks, self.topology, needs)

    def mixer(self) -> Mixer:
        """See `Mixing.mixer`."""
        return ShardedMixer(self)


class ShardedMixer(Mixer):
    """Mixes one vector over nodes.

    1. Reduce-scatter inside the node: each rank has the exact mean of one shard.
    2. Mix the shard with those of the ranks of the same place on other nodes.
    3. All-gather inside the node.
    """

    def __init__(self, mixing: ShardedMixing) -> None:
        """Begins without memory."""
        super().__init__(mixing)
        self._node = mixing.node
        self._vectors: tuple[torch.Tensor, torch.Tensor] | None = None

    def exchange(self, x: torch.Tensor, turn: int, number: int, scalar: torch.Tensor | None = None) -> Iterator[Work]:
        """See `Mixer.exchange`; all of the step is taken, but for the last copy."""
        whole, shard = self._vectors_like(x)
        whole[: x.numel()] = x
        # Communications of all buckets begin on the runtime's threads, in one order.
        yield FINISHED
        yield self._node.reduce_scatter(shard, whole, ReduceOp.AVG)
        yield from super().exchange(shard, turn, number, scalar)
        super().terms(shard, turn).mix()
        yield self._node.all_gather(whole, shard)

    def terms(self, x: torch.Tensor, turn: int) -> Terms:
        """See `Mixer.terms`: the result alone."""
        whole, _ = self._vectors_like(x)
        rank = self.mixing.rank
        return Terms({-1: whole[: x.numel()], rank: x}, {-1: 1.0}, rank)

    def _vectors_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns memory for a whole vector of the node, whose length its ranks divide, and for a shard."""
        if self._vectors is None:
            dtype, share = torch.promote_types(x.dtype, torch.float32), -(-x.numel() // self._node.size)
            self._vectors = (x.new_zeros(share * self._node.size, dtype=dtype), x.new_zeros(share, dtype=dtype))
        return self._vectors
