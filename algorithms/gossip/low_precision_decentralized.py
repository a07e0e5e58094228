"""Decentralized training with few bits: DCD-PSGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Peers, root_mean_square
from bagua_kernels.algorithms.rounds.round_algorithm import RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.comm.topology import weighted_sum
from bagua_kernels.compression import Codec


@register
class LowPrecisionDecentralized(Differences):
    """Mixes with neighbours, of whose parameters each rank has replicas, kept up to date by encoded differences.

    DCD-PSGD (Tang et al., NeurIPS 2018, algorithm 1), BAGUA's low-precision decentralized algorithm. Each rank has a replica
    of its own parameters and of each neighbour's, at first the common parameters. After the optimizer's step to x:

    1. Encode q = C(sum_j W_ij replica_j + x - 2 replica_i), over the neighbours j and this rank i.
    2. Send q to the neighbours, and receive theirs.
    3. Add each decoded q_j to replica_j, this rank's own too. So all ranks have the same bits of a replica.
    4. Before the next forward pass, put replica_i in the place of the parameters.

    Replicas are float32 whatever the parameters are. The codec's relative error has to be small: see `noise`, which a guard
    watches. `Choco` converges with any.
    """

    name = "lowprec"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Codec | str = "minmax_uint8",
        peers: Peers = "ring",
        seed: int = 0,
        **options: Unpack[RoundOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `RoundAlgorithm`.
            optimizer: as for `RoundAlgorithm`.
            codec: a codec or its spec.
            peers: as for `Decentralized`; of one symmetric matrix.
            seed: of random numbers.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or a value that should be a codec is not one.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        super().__init__(module, optimizer, codec=codec, peers=peers, seed=seed, **options)

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`."""
        for bucket in self.flat.buckets:
            for rank in (self.mailbox.rank, *self.neighbours):
                self.replica(bucket, rank).copy_(bucket.flat)

    def replica(self, bucket: Bucket, rank: int) -> torch.Tensor:
        """Returns the replica of the parameters of this rank, or of a neighbour."""
        return self.flat.kept(bucket, f"replica of rank {rank}")

    def replicas(self) -> dict[int, dict[int, torch.Tensor]]:
        """Returns copies of the replicas, by number of the bucket and by rank; padding between parameters is left out."""
        self.wait()
        ranks = (self.mailbox.rank, *self.neighbours)
        return {
            bucket.index: {rank: torch.cat([self.replica(bucket, rank)[span] for span in bucket.own]) for rank in ranks}
            for bucket in self.flat.buckets
        }

    def disagreement(self) -> float:
        """See `ModelAlgorithm.disagreement`; between this rank's replica and its first neighbour's."""
        ranks = (self.mailbox.rank, *self.neighbours)[:2] if self._mailbox is not None else ()
        return (
            0.0
            if len(ranks) < 2
            else root_mean_square(
                self.replica(bucket, ranks[0])[span] - self.replica(bucket, ranks[1])[span]
                for bucket in self.flat.buckets
                for span in bucket.own
            )
        )

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        rank, work = self.mailbox.rank, self.flat.kept(bucket, "work", saved=False)
        replicas = {each: self.replica(bucket, each) for each in (rank, *self.neighbours)}
        weighted_sum(replicas, self.weights, work)
        work.add_(bucket.flat).sub_(replicas[rank], alpha=2)
        yield from self.sent(bucket, work, turn)
        for each, replica in replicas.items():
            replica.add_(self.codec.decode(self.payload(bucket, each), work))

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        bucket.flat.copy_(self.replica(bucket, self.mailbox.rank))
