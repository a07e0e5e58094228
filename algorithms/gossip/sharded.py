"""A gossip step between nodes: exact means inside each node, and a shard of the bucket for each of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bagua_kernels.algorithms.rounds.flat_parameters import FlatParameters
from bagua_kernels.algorithms.rounds.mixing import Mixer, Peers, Terms, topology_of
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Nodes, ReduceOp, Work
from bagua_kernels.comm.topology import Needs
from bagua_kernels.comm.work import FINISHED


class ShardedMixer(Mixer):
    """Mixes over nodes.

    1. Reduce-scatter inside the node: each rank has the exact mean of one shard.
    2. Mix the shard with those of the ranks of the same place on other nodes.
    3. All-gather inside the node.
    """

    def __init__(
        self,
        communicator: Communicator,
        mailbox: Mailbox,
        peers: Peers,
        nodes: Nodes | Iterable[Iterable[int]] | None,
        flat: FlatParameters,
    ) -> None:
        """Finds the nodes, and connects the ranks inside; collective.

        Raises:
            ValueError: nodes have different numbers of ranks, or the topology has not the number of nodes.
        """
        if nodes is None:
            nodes = Nodes.find(communicator)
        elif not isinstance(nodes, Nodes):
            nodes = Nodes.given(nodes)
        sizes = {len(node) for node in nodes.members}
        if len(sizes) > 1:
            raise ValueError(
                f"hierarchical mixing gives each rank of a node a shard, and expects as many ranks on each node, got nodes "
                f"{[list(node) for node in nodes.members]}: leave out hierarchical, or ranks"
            )
        rank = communicator.rank
        own = next(number for number, node in enumerate(nodes.members) if rank in node)
        self._place = nodes.members[own].index(rank)
        ranks = [node[self._place] for node in nodes.members]
        super().__init__(mailbox, topology_of(peers, len(ranks)), flat, ranks=ranks)
        local = communicator.split(nodes.members[own])
        assert local is not None
        self._local: Communicator = local
        self.communicators = [local]
        self._vectors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def check(self, communicator: Communicator, needs: Needs) -> None:
        """See `Mixer.check`; ranks of one place on all nodes compare theirs."""
        across = communicator.split(self._ranks)
        assert across is not None
        with across:
            self.topology.check(across, needs)

    def exchange(
        self, bucket: Bucket, x: torch.Tensor, turn: int, number: int, scalar: torch.Tensor | None = None
    ) -> Iterator[Work]:
        """See `Mixer.exchange`; all of the step is taken, but for the last copy."""
        whole, shard = self._vectors_of(bucket, x)
        whole[: x.numel()] = x
        # Communications of all buckets begin on the runtime's threads, in one order.
        yield FINISHED
        yield self._local.reduce_scatter(shard, whole, ReduceOp.AVG)
        yield from super().exchange(bucket, shard, turn, number, scalar)
        super().terms(bucket, shard, turn).mix()
        yield self._local.all_gather(whole, shard)

    def terms(self, bucket: Bucket, x: torch.Tensor, turn: int) -> Terms:
        """See `Mixer.terms`: the result alone."""
        whole, _ = self._vectors_of(bucket, x)
        return Terms({-1: whole[: x.numel()], self._rank: x}, {-1: 1.0}, self._rank)

    def _vectors_of(self, bucket: Bucket, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if bucket.index not in self._vectors:
            dtype, share = torch.promote_types(x.dtype, torch.float32), -(-x.numel() // self._local.size)
            self._vectors[bucket.index] = (
                x.new_zeros(share * self._local.size, dtype=dtype),
                x.new_zeros(share, dtype=dtype),
            )
        return self._vectors[bucket.index]
