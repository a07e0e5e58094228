"""Decentralized training with exact values: D-PSGD."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.mixing import MixerRound, Peers, checked_peers
from bagua_kernels.algorithms.gossip.sharded import mixing_of
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.models.round import Round, When
from bagua_kernels.algorithms.models.rounds import Rounds
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import ReduceOp, Work
from bagua_kernels.comm.topology import Complete


@register
class Decentralized(RoundAlgorithm):
    """Each rank mixes its parameters with those of its neighbours (D-PSGD, Lian et al., NeurIPS 2017, algorithm 1).

    For each step k:

    1. Before the forward pass, start to exchange the parameters x_k with the neighbours of this round.
    2. Beside forward and backward, add up what arrives: mixed = sum_j W_ij x_j.
    3. When the gradient at x_k is complete, put `mixed` in the place of the parameters.
    4. Take the optimizer's step from there.

    In two tiers, ranks of a node take their exact mean first. Then each exchanges a shard of its own with other nodes.

    Options and their defaults, all by keyword::

        peers='one_peer_exponential'
                               who mixes with whom: "all", "shift_one", "ring", "torus", "exponential",
                               "one_peer_exponential", "random", or a `Topology`, whose matrices are doubly stochastic
        interval=1             the number of steps for which there is one round of exchanges
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        scaler=None            a `GradScaler` that may leave out this optimizer's step on one rank alone
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "decentralized"
    # BAGUA's.
    synonyms = MappingProxyType({"peer_selection_mode": "peers", "communication_interval": "interval"})
    needs_even_nodes = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        peers: Peers = "one_peer_exponential",
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `RoundAlgorithm`.
            optimizer: as for `RoundAlgorithm`.
            peers: who mixes with whom: "all", "shift_one", "ring", "torus", "exponential", "one_peer_exponential", "random", or
                a `Topology`, whose matrices are doubly stochastic. In two tiers it is one of nodes.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, nodes have different numbers of ranks, or as for `RoundAlgorithm`.
        """
        self.peers = checked_peers(peers)
        super().__init__(module, optimizer, **options)

    # Nothing is kept beside the parameters.
    heals_by_mean = False
    takes_drafts = True

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `RoundAlgorithm.loop_for`."""
        self._mixing = mixing_of(local, self.peers)
        self._mixing.check(local.communicator, "doubly")
        return self.rounds_with(local, self._mixing.options())

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        # All weights are equal: an all-reduce sends less.
        if isinstance(self._mixing.topology, Complete):
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
