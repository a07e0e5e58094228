"""Decentralized training with any codec: Choco-SGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.consensus_step import tuned
from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Peers, root_mean_square
from bagua_kernels.algorithms.rounds.round_algorithm import RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Work
from bagua_kernels.comm.topology import whole
from bagua_kernels.compression import Codec, Unbiased, decode_apply
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.gossip import ADDED, CHOCO, TOWARDS


@register
class Choco(Differences):
    """Moves towards the neighbours by a fraction of what all know of each other (Choco-SGD, Koloskova et al., ICML 2019).

    Each rank has a public copy `own` of its parameters, at first the common parameters, and `gap` = sum_j W_ij (own_j - own_i),
    at first zero. After the optimizer's step to x:

    1. Encode q = C(x - own); send it to the neighbours, and receive theirs.
    2. own += q_i, and gap += sum_j W_ij (q_j - q_i), over the neighbours j.
    3. Before the next forward pass, x += eta gap.

    The paper has sum_j W_ij own_j in place of `gap`. Its rounding errors would move the mean of all ranks in all later steps.

    Any codec is a contraction here: what an unbiased one encodes is divided by 1 + omega. Both vectors are float32.
    """

    name = "choco"
    remedy = "a smaller eta"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Codec | str = "minmax_uint8",
        eta: float | None = None,
        peers: Peers = "ring",
        seed: int = 0,
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `RoundAlgorithm`.
            optimizer: as for `RoundAlgorithm`.
            codec: a codec or its spec.
            eta: the consensus step, above 0 and at most 1. If None, rank 0 chooses it by a simulation of all ranks: the step of a
                few that brings them nearest to their mean.
            peers: as for `Decentralized`; of one symmetric matrix.
            seed: of random numbers.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or a value that should be a codec is not one.
            ValueError: `eta` or the topology does not fit, or as for `RoundAlgorithm`.
        """
        if eta is not None and not 0 < eta <= 1:
            raise ValueError(f"eta must be above 0 and at most 1, or None, got {eta=}")
        self.eta = eta
        self.factor = 1.0
        super().__init__(module, optimizer, codec=codec, peers=peers, seed=seed, **options)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        bias = self.codec.bias
        if isinstance(bias, Unbiased):
            self.factor = 1 / (1 + bias.omega)
        if self.eta is None:
            mine = tuned(self.codec, self.topology) if mailbox.rank == 0 else 0.0
            self.eta = float(self._communicator.broadcast_object(mine))

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`."""
        for bucket in self.flat.buckets:
            self.flat.kept(bucket, "own").copy_(bucket.flat)
            self.flat.kept(bucket, "gap").zero_()

    def disagreement(self) -> float:
        """See `ModelAlgorithm.disagreement`; between this rank's public copy and the weighted mean of its neighbours'."""
        gaps = [(self.flat.kept(bucket, "gap"), bucket.own) for bucket in self.flat.buckets]
        return root_mean_square(gap[span] for gap, spans in gaps for span in spans)

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        own, gap = self.flat.kept(bucket, "own"), self.flat.kept(bucket, "gap")
        yield from self.encode(bucket, turn, CHOCO, [bucket.flat, own], [self.factor])
        factors, divisor = whole(dict(zip(self.ranks, self.weights, strict=True)))
        factors[self.mailbox.rank] -= divisor
        # As whole numbers, weights of what a rank sent sum to zero over all ranks.
        weights = list(factors.values())
        decode_apply(self.codec, self.payloads(bucket), ADDED, [gap], weights=weights, scale=1 / divisor)

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        assert self.eta is not None
        elementwise.apply(TOWARDS, [bucket.flat, self.flat.kept(bucket, "gap")], [self.eta])
