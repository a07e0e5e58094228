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
from bagua_kernels.compression import Codec, Unbiased, decode_apply
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.gossip import ADDED, CHOCO, TOWARDS


@register
class Choco(Differences):
    """Moves towards the neighbours by a fraction of what all know of each other (Choco-SGD, Koloskova et al., ICML 2019).

    Each rank has a public copy `own` of its parameters, and `total` = sum_j W_ij own_j; both begin with the common
    parameters. After the optimizer's step to x:

    1. Encode q = C(x - own); send it to the neighbours, and receive theirs.
    2. own += q_i, and total += sum_j W_ij q_j, over the neighbours j and this rank i.
    3. Before the next forward pass, x += eta (total - own).

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
            for key in ("own", "total"):
                self.flat.kept(bucket, key).copy_(bucket.flat)

    def disagreement(self) -> float:
        """See `ModelAlgorithm.disagreement`; between this rank's public copy and the weighted mean of its neighbours'."""
        return root_mean_square(
            self.flat.kept(bucket, "total")[span] - self.flat.kept(bucket, "own")[span]
            for bucket in self.flat.buckets
            for span in bucket.own
        )

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        own, total = self.flat.kept(bucket, "own"), self.flat.kept(bucket, "total")
        yield from self.encode(bucket, turn, CHOCO, [bucket.flat, own], [self.factor])
        decode_apply(self.codec, self.payloads(bucket), ADDED, [total], weights=self.weights)

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        assert self.eta is not None
        own, total = self.flat.kept(bucket, "own"), self.flat.kept(bucket, "total")
        elementwise.apply(TOWARDS, [bucket.flat, own, total], [self.eta])
