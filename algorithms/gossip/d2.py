"""Decentralized training without the bias of unequal data: D2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import numpy as np
import torch

from bagua_kernels.algorithms.gossip.mixing import Mixer, MixerRound, Peers, checked_peers
from bagua_kernels.algorithms.gossip.sharded import mixing_of
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.models.rounds import Rounds
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.comm.topology import Topology

_TOLERANCE = 1e-9  # of eigenvalues in float64


@register
class D2(RoundAlgorithm):
    """Mixes with neighbours, and corrects for what their data have in common with nobody's (D2, Tang et al., ICML 2018).

    After the optimizer's step from x to x+, with a correction c that is zero at first:

    1. Exchange y = x+ - c with the neighbours.
    2. Subtract what flows from the neighbours: c -= sum_j W_ij (y_j - y_i).
    3. Before the next forward pass, put x = x+ - c, which is sum_j W_ij y_j, in the place of the parameters.

    Flows between two ranks cancel bit for bit. Rounding of the sum itself, which c would take over, would move the mean of all
    ranks in all later steps.

    With plain SGD that is the paper's algorithm, which keeps the last gradient and the last parameters instead. Here one
    vector is kept, for any optimizer and schedule of learning rates.

    Options and their defaults, all by keyword::

        peers='lazy_ring'      who mixes with whom: "lazy_ring", "chain", another name of `Decentralized`, or a
                               `Topology`; its only matrix W is symmetric, with eigenvalues above -1/3
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

    name = "d2"
    needs_even_nodes = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        peers: Peers = "lazy_ring",
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `RoundAlgorithm`.
            optimizer: as for `RoundAlgorithm`.
            peers: who mixes with whom: "lazy_ring", "chain", another name of `Decentralized`, or a `Topology`; its only matrix W
                is symmetric, with eigenvalues above -1/3.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        self.peers = checked_peers(peers)
        super().__init__(module, optimizer, **options)

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `RoundAlgorithm.loop_for`."""
        self._mixing = mixing_of(local, self.peers)
        self._mixing.check(local.communicator, "symmetric")
        check_spectrum(self._mixing.topology)
        return self.rounds_with(local, self._mixing.options())

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        return CorrectedRound(local, bucket, self._mixing.mixer())


class CorrectedRound(MixerRound):
    """Mixes the parameters without a correction, which takes up what flows from the neighbours."""

    def __init__(self, local: LocalModel, bucket: Bucket, mixer: Mixer) -> None:
        """Begins without a correction."""
        super().__init__(local, bucket, mixer)
        self._correction, self._sent = self.kept("correction"), self.kept("sent", saved=False)

    def restart(self) -> None:
        """See `Round.restart`."""
        self._correction.zero_()

    def run(self, number: int) -> Iterator[Work]:
        """Step 1; see `Round.run`."""
        torch.sub(self.bucket.flat, self._correction, out=self._sent)
        yield from self.mixer.exchange(self._sent, number, self.exchange_number(number))

    def merge(self, number: int) -> None:
        """Steps 2 and 3; see `Round.merge`."""
        correction, bucket = self._correction, self.bucket
        self.mixer.terms(self._sent, number).flow(correction, bucket.flat)


def check_spectrum(topology: Topology) -> None:
    """Raises unless a symmetric topology has one matrix, whose eigenvalues are above -1/3.

    Raises:
        ValueError: it has several matrices, or an eigenvalue of -1/3 or below, with which D2 does not converge.
    """
    if topology.period != 1:
        raise ValueError(f"D2 expects one matrix for all steps, got {topology!r}: use a static topology such as a ring")
    least = float(np.linalg.eigvalsh(topology.matrix())[0])
    if least <= -1 / 3 + _TOLERANCE:
        raise ValueError(
            f"D2 converges if all eigenvalues of the mixing matrix are above -1/3, got {least:.6f} for {topology!r}: pass "
            f"peers=Lazy({topology!r}), which is (I + W) / 2"
        )
