"""Decentralized training with exact values: D-PSGD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.sharded import ShardedMixer
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Mixer, Peers, checked_peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Nodes, ReduceOp, Work
from bagua_kernels.comm.topology import Complete


@register
class Decentralized(RoundAlgorithm):
    """Each rank mixes its parameters with those of its neighbours (D-PSGD, Lian et al., NeurIPS 2017, algorithm 1).

    For each step k:

    1. Before the forward pass, start to exchange the parameters x_k with the neighbours of this round.
    2. Beside forward and backward, add up what arrives: mixed = sum_j W_ij x_j.
    3. When the gradient at x_k is complete, put `mixed` in the place of the parameters.
    4. Take the optimizer's step from there.

    With `hierarchical`, ranks of a node take their exact mean first. Then each exchanges a shard of its own with other nodes.
    """

    name = "decentralized"
    due = "step"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        peers: Peers = "one_peer_exponential",
        hierarchical: bool = False,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `RoundAlgorithm`.
            optimizer: as for `RoundAlgorithm`.
            peers: who mixes with whom: "all", "shift_one", "ring", "torus", "exponential", "one_peer_exponential", "random", or
                a `Topology`, whose matrices are doubly stochastic. With `hierarchical`, it is one of nodes.
            hierarchical: True for exact means inside nodes. All nodes have the same number of ranks.
            nodes: which ranks share a node; found from the environment if None.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, nodes have different numbers of ranks, or as for `RoundAlgorithm`.
        """
        self.peers, self.hierarchical, self.nodes = checked_peers(peers), hierarchical, nodes
        # Collectives inside nodes run one after the other on all ranks.
        self.several = hierarchical
        super().__init__(module, optimizer, **options)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        if self.hierarchical:
            self.mixer = ShardedMixer(self._communicator, mailbox, self.peers, self.nodes, self.flat)
        else:
            self.mixer = Mixer(mailbox, topology_of(self.peers, mailbox.size), self.flat)
        # All weights are equal: an all-reduce sends less.
        self._all = isinstance(self.mixer.topology, Complete) and not self.hierarchical
        self.mixer.check(self._communicator, "doubly")

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        assert self.mixer is not None
        if self._all:
            mean = self.flat.kept(bucket, "mean", saved=False)
            mean.copy_(bucket.flat)
            yield self._communicator.all_reduce(mean, ReduceOp.AVG)
        else:
            yield from self.mixer.exchange(bucket, bucket.flat, turn, self.number(bucket, turn))

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        assert self.mixer is not None
        if self._all:
            bucket.flat.copy_(self.flat.kept(bucket, "mean", saved=False))
        else:
            self.mixer.terms(bucket, bucket.flat, turn).mix()
