"""Decentralized training without the bias of unequal data: D2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import numpy as np
import torch

from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Mixer, Peers, checked_peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Work
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
    """

    name = "d2"

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
            peers: as for `Decentralized`, "lazy_ring", or "chain"; of one symmetric matrix W, whose eigenvalues are above -1/3.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        self.peers = checked_peers(peers)
        super().__init__(module, optimizer, **options)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        topology = topology_of(self.peers, mailbox.size)
        self.mixer = Mixer(mailbox, topology, self.flat)
        self.mixer.check(self._communicator, "symmetric")
        check_spectrum(topology)

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`."""
        for bucket in self.flat.buckets:
            self.flat.kept(bucket, "correction").zero_()

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        assert self.mixer is not None
        correction, sent = self._vectors(bucket)
        torch.sub(bucket.flat, correction, out=sent)
        yield from self.mixer.exchange(bucket, sent, turn, self.number(bucket, turn))

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        assert self.mixer is not None
        correction, sent = self._vectors(bucket)
        self.mixer.terms(bucket, sent, turn).flow(correction, bucket.flat)

    def _vectors(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        return self.flat.kept(bucket, "correction"), self.flat.kept(bucket, "sent", saved=False)


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
