"""Decentralized training on directed graphs: stochastic gradient push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch

from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.rounds.mixing import Mixer, Peers, checked_peers, topology_of
from bagua_kernels.algorithms.rounds.round_algorithm import RoundAlgorithm, RoundOptions
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox, Work


@register
class StochasticGradientPush(RoundAlgorithm):
    """Pushes shares of a numerator and of a weight along a directed graph (SGP, Assran et al., ICML 2019, algorithm 1).

    Each rank has a numerator n, at first its parameters, and a weight w, at first 1; its parameters are x = n / w. After the
    optimizer's step from x to x+:

    1. Add the step to the numerator: n += x+ - n / w.
    2. Push: n = sum_j W_ij n_j and w = sum_j W_ij w_j. Columns of W sum to 1, so that the sums over all ranks stay.
    3. Before the next forward pass, put x = n / w in the place of the parameters.

    If the rows of W sum to 1 as well, w stays 1. Then it is not sent, and the parameters are the numerator. The weight is
    float64.
    """

    name = "sgp"

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
            peers: as for `Decentralized`; columns of each matrix sum to 1.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        self.peers = checked_peers(peers)
        self._weight = torch.ones(1, dtype=torch.float64, device="cpu")
        super().__init__(module, optimizer, **options)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        super().open(mailbox)
        topology = topology_of(self.peers, mailbox.size)
        self.mixer = Mixer(mailbox, topology, self.flat)
        self.mixer.check(self._communicator, "columns")
        self._weighs = not topology.doubly_stochastic
        # waits: at start.
        self._weight = self._weight.to(mailbox.device)

    @property
    def push_weight(self) -> float:
        """The weight w of this rank."""
        # waits: for statistics and checkpoints.
        return float(self._weight)

    @property
    def _divisor(self) -> torch.Tensor:
        """The weight as a tensor of no dimensions, which leaves quotients in the dtype of the vector."""
        return self._weight[0]

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`."""
        self._weight.fill_(1.0)
        if self._weighs:
            for bucket in self.flat.buckets:
                self.flat.kept(bucket, "numerator").copy_(bucket.flat)

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `ModelAlgorithm.take_written`; the numerator follows, and the weight stays."""
        super().take_written(values)
        self._take_numerators()

    def _take_numerators(self) -> None:
        if self._weighs:
            for bucket in self.flat.buckets:
                self.flat.kept(bucket, "numerator").copy_(bucket.flat).mul_(self._divisor)

    @torch.no_grad()
    def _in_place(self, call: str) -> bool:
        """See `ModelAlgorithm._in_place`; what was written is what means are taken of."""
        several = super()._in_place(call)
        if several and call in ("synchronize()", "averaged()") and self.has_to_keep():
            self._take_numerators()
        return several

    def mean_source(self, bucket: Bucket) -> torch.Tensor:
        """See `ModelAlgorithm.mean_source`: the sum of numerators is that of the parameters, for weights sum to P."""
        if not self._weighs:
            return bucket.flat
        numerator = self.flat.kept(bucket, "numerator")
        return numerator + self._learned(bucket, numerator)

    def _learned(self, bucket: Bucket, numerator: torch.Tensor) -> torch.Tensor:
        """Returns what steps have added to the parameters since they were set to n / w, whatever their dtype."""
        before = (numerator / self._divisor).to(bucket.flat.dtype)
        return bucket.flat.to(numerator.dtype) - before.to(numerator.dtype)

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        assert self.mixer is not None
        vector, weight = self._pushed(bucket), None
        if self._weighs:
            vector.add_(self._learned(bucket, vector))
            # The last bucket brings the weight: those before have read the old one by then.
            weight = self._weight if bucket.index == len(self.flat.buckets) - 1 else None
        else:
            # A copy: the parameters are the caller's to read and to write until the next forward pass.
            vector.copy_(bucket.flat)
        yield from self.mixer.exchange(bucket, vector, turn, self.number(bucket, turn), weight)

    def merge(self, bucket: Bucket, turn: int) -> None:
        """See `RoundAlgorithm.merge`."""
        assert self.mixer is not None
        vector = self._pushed(bucket)
        self.mixer.terms(bucket, vector, turn).mix()
        if not self._weighs:
            bucket.flat.copy_(vector)
        elif bucket.index == len(self.flat.buckets) - 1:
            # The weight that goes with all numerators came with the last one.
            for each in self.flat.buckets:
                each.flat.copy_(self._pushed(each) / self._divisor)

    def _pushed(self, bucket: Bucket) -> torch.Tensor:
        """Returns what is pushed of a bucket: the numerator, or a copy of the parameters while weights stay 1."""
        return self.flat.kept(bucket, "numerator") if self._weighs else self.flat.kept(bucket, "pushed", saved=False)

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`."""
        return {"weight": self.push_weight}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """See `ModelAlgorithm.load_numbers`."""
        self._weight.fill_(numbers["weight"])
