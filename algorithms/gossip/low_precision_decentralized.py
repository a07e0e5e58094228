"""Decentralized training with few bits: DCD-PSGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Peers, root_mean_square
from bagua_kernels.algorithms.rounds.round_algorithm import RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.comm.topology import weighted_sum
from bagua_kernels.compression import Codec, decode_add
from bagua_kernels.rules.gossip import DCD

_CARRIES = 8


@register
class LowPrecisionDecentralized(Differences):
    """Mixes with neighbours, of whose parameters each rank has replicas, kept up to date by encoded differences.

    DCD-PSGD (Tang et al., NeurIPS 2018, algorithm 1), BAGUA's low-precision decentralized algorithm. Each rank has a replica
    of its own parameters and of each neighbour's, at first the common parameters. After the optimizer's step to x:

    1. Encode q = C(sum_j W_ij replica_j + x - 2 replica_i), over the neighbours j and this rank i. In the same pass over memory
       set the parameters to replica_i + q.
    2. Send q to the neighbours, and receive theirs, beside the next forward and backward pass.
    3. Add each decoded q_j to replica_j, this rank's own too. So all ranks have the same bits of a replica.

    Replicas are float32 whatever the parameters are. The codec's relative error has to be small: see `noise`, which a guard
    watches. `Choco` converges with any.
    """

    name = "lowprec"
    due = "round"
    _carries = 0  # rounds in which parameters that were written get what is still lacking

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
            self._rows(bucket).copy_(bucket.flat)

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `ModelAlgorithm.take_written`.

        A difference to parameters that were written is large, and so is what the codec loses of it. In the rounds that follow,
        what a round has lacked is added in the next.
        """
        super().take_written(values)
        self._carries = _CARRIES
        for bucket in self.flat.buckets:
            self._rest(bucket).zero_()

    def _rest(self, bucket: Bucket) -> torch.Tensor:
        return self.flat.kept(bucket, "rest")

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`."""
        return super().numbers() | ({"carries": float(self._carries)} if self._carries else {})

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """See `ModelAlgorithm.load_numbers`."""
        super().load_numbers(numbers)
        self._carries = int(numbers.get("carries", 0))

    def _target(self, bucket: Bucket) -> torch.Tensor:
        """Adds to the parameters what they lack, and returns what they would become without a codec, in float32."""
        bucket.flat.add_(self._rest(bucket))
        rows = self._rows(bucket)
        mixed = weighted_sum(
            dict(zip(self.ranks, rows, strict=True)),
            dict(zip(self.ranks, self.weights, strict=True)),
            torch.empty_like(rows[0]),
        )
        return mixed.sub_(rows[self.ranks.index(self.mailbox.rank)]).add_(bucket.flat)

    def _rows(self, bucket: Bucket) -> torch.Tensor:
        """Returns the replicas of a bucket, one row for each of `ranks`."""
        return self.flat.rows(bucket, "replica of rank", self.ranks)

    def replicas(self) -> dict[int, dict[int, torch.Tensor]]:
        """Returns copies of the replicas, by number of the bucket and by rank; padding between parameters is left out."""
        # Replicas are changed beside training.
        self.await_exchanges()
        return {
            bucket.index: {
                rank: torch.cat([row[span] for span in bucket.own])
                for rank, row in zip(self.ranks, self._rows(bucket), strict=True)
            }
            for bucket in self.flat.buckets
        }

    def disagreement(self) -> float:
        """See `ModelAlgorithm.disagreement`; between the first two of `ranks`."""
        # Replicas are changed beside training.
        self.await_exchanges()
        rows = [self._rows(bucket) for bucket in self.flat.buckets if len(self.ranks) > 1]
        spans = [(row, span) for row, bucket in zip(rows, self.flat.buckets, strict=False) for span in bucket.own]
        return root_mean_square(row[0, span] - row[1, span] for row, span in spans)

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        rows = self._rows(bucket)
        own = rows[self.ranks.index(self.mailbox.rank)]
        # The rule writes the new parameters, which are the new replica.
        steps = self.encode(bucket, turn, DCD, [bucket.flat, own], replicas=rows)
        if self._carries:
            target = self._target(bucket)
            encoded = next(steps)
            self._rest(bucket).copy_(target).sub_(bucket.flat)
            if bucket is self.flat.buckets[-1]:
                self._carries -= 1
            yield encoded
        yield from steps
        decode_add(self.codec, self.payloads(bucket), rows)
