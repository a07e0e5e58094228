"""Decentralized training with exact values: D-PSGD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.mixing import MixerRound, Mixing, Peers, checked_peers, topology_of
from bagua_kernels.algorithms.gossip.sharded import ShardedMixing
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.models.round import Round, When
from bagua_kernels.algorithms.models.rounds import Rounds, RoundsOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Nodes, ReduceOp, Work
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

    Options and their defaults, all by keyword::

        peers='one_peer_exponential'
                               who mixes with whom: "all", "shift_one", "ring", "torus", "exponential",
                               "one_peer_exponential", "random", or a `Topology`, whose matrices are doubly stochastic
        hierarchical=False     True for exact means inside nodes
        nodes=None             which ranks share a node; found from the environment if None
        interval=1             the number of steps for which there is one round of exchanges
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        scaler=None            a `GradScaler` that may leave out this optimizer's step on one rank alone
    """

    name = "decentralized"

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
        super().__init__(module, optimizer, **options)

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `RoundAlgorithm.loop_for`."""
        if self.hierarchical:
            self._mixing: Mixing = ShardedMixing(local, self.peers, self.nodes)
        else:
            self._mixing = Mixing(local.mailbox, topology_of(self.peers, local.mailbox.size))
        self._mixing.check(local.communicator, "doubly")
        # Collectives inside nodes run one after the other on all ranks.
        return self.rounds_with(local, RoundsOptions(several=self.hierarchical, decay=self._mixing.topology.rho))

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        # All weights are equal: an all-reduce sends less.
        if isinstance(self._mixing.topology, Complete) and not self.hierarchical:
            return MeanRound(local, bucket)
        return MixedRound(local, bucket, self._mixing.mixer())


class MixedRound(MixerRound):
    """Mixes the parameters with those of neighbours."""

    when = When.BESIDE_STEP

    def run(self, number: int) -> Iterator[Work]:
        """Steps 1 and 2; see `Round.run`."""
        return self.mixer.exchange(self.bucket.flat, number, self.exchange_number(number))

    def merge(self, number: int) -> None:
        """Step 3; see `Round.merge`."""
        self.mixer.terms(self.bucket.flat, number).mix()


class MeanRound(Round):
    """Takes the mean of all ranks' parameters."""

    when = When.BESIDE_STEP

    def run(self, number: int) -> Iterator[Work]:
        """Steps 1 and 2; see `Round.run`."""
        mean = self.kept("mean", saved=False)
        mean.copy_(self.bucket.flat)
        yield self.local.communicator.all_reduce(mean, ReduceOp.AVG)

    def merge(self, number: int) -> None:
        """Step 3; see `Round.merge`."""
        self.bucket.flat.copy_(self.kept("mean", saved=False))
