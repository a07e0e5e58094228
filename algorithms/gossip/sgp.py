"""Decentralized training on directed graphs: stochastic gradient push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

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


@register
class StochasticGradientPush(RoundAlgorithm):
    """Pushes shares of a numerator and of a weight along a directed graph (SGP, Assran et al., ICML 2019, algorithm 1).

    Each rank has a numerator n, at first its parameters, and a weight w, at first 1; its parameters are x = n / w. After the
    optimizer's step from x to x+:

    1. Add the step to the numerator: n += x+ - n / w.
    2. Push: n = sum_j W_ij n_j and w = sum_j W_ij w_j. Columns of W sum to 1, so that the sums over all ranks stay.
    3. Before the next forward pass, put x = n / w in the place of the parameters.

    In two tiers W is a matrix of nodes, whose ranks take their exact mean before step 2.

    If the rows of W sum to 1 as well, w stays 1. Then it is not sent, and the parameters are the numerator. The weight is
    float64.

    Options and their defaults, all by keyword::

        peers='one_peer_exponential'
                               who sends to whom: a name of `Decentralized`, or a `Topology`; columns of each matrix sum
                               to 1
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

    name = "sgp"
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
            peers: who sends to whom: a name of `Decentralized`, or a `Topology`; columns of each matrix sum to 1.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or `peers` is neither a name nor a topology.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        self.peers = checked_peers(peers)
        self._weight = PushWeight()
        super().__init__(module, optimizer, **options)

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `RoundAlgorithm.loop_for`."""
        self._mixing = mixing_of(local, self.peers)
        self._mixing.check(local.communicator, "columns")
        self._weight = PushWeight(local.mailbox.device)
        return self.rounds_with(local, self._mixing.options())

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        if self._mixing.topology.doubly_stochastic:
            return CopyRound(local, bucket, self._mixing.mixer(), self._weight)
        return NumeratorRound(local, bucket, self._mixing.mixer(), self._weight)

    @property
    def push_weight(self) -> float:
        """The weight w of this rank."""
        return self._weight.value


class PushWeight:
    """The weight of a rank, which all of its buckets share.

    Attributes:
        vector: the weight, float64, shape (1,).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Begins with 1, on the CPU if no device is given."""
        # waits: at start.
        self.vector = torch.ones(1, dtype=torch.float64, device=device or torch.device("cpu"))

    @property
    def value(self) -> float:
        """As a number."""
        # waits: for statistics and checkpoints.
        return float(self.vector)

    @property
    def divisor(self) -> torch.Tensor:
        """As a tensor of no dimensions, which leaves quotients in the dtype of the vector."""
        return self.vector[0]


class PushedRound(MixerRound):
    """Base of the rounds that push a vector beside the parameters.

    Attributes:
        weight: of this rank.
    """

    def __init__(self, local: LocalModel, bucket: Bucket, mixer: Mixer, weight: PushWeight) -> None:
        """Begins before the first round.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            mixer: of the vector.
            weight: of this rank.
        """
        super().__init__(local, bucket, mixer)
        self.weight = weight

    def restart(self) -> None:
        """See `Round.restart`."""
        self.weight.vector.fill_(1.0)

    def numbers(self) -> dict[str, Any]:
        """See `Round.numbers`."""
        return {"weight": self.weight.value}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Round.load_numbers`."""
        self.weight.vector.fill_(numbers.get("weight", 1.0))


class CopyRound(PushedRound):
    """Where weights stay 1: pushes a copy, for the parameters are the caller's until the next forward pass."""

    def run(self, number: int) -> Iterator[Work]:
        """See `Round.run`."""
        copy = self.kept("pushed", saved=False)
        copy.copy_(self.bucket.flat)
        yield from self.mixer.exchange(copy, number, self.exchange_number(number))

    def merge(self, number: int) -> None:
        """See `Round.merge`."""
        copy = self.kept("pushed", saved=False)
        self.mixer.terms(copy, number).mix()
        self.bucket.flat.copy_(copy)


class NumeratorRound(PushedRound):
    """Pushes the numerator; the last bucket brings the weight."""

    def __init__(self, local: LocalModel, bucket: Bucket, mixer: Mixer, weight: PushWeight) -> None:
        """Begins with the parameters as the numerator; arguments as for `PushedRound`."""
        super().__init__(local, bucket, mixer, weight)
        self._numerator = self.kept("numerator")

    def restart(self) -> None:
        """See `Round.restart`."""
        super().restart()
        self._numerator.copy_(self.bucket.flat)

    def follow(self) -> None:
        """See `Round.follow`; the weight stays."""
        self._numerator.copy_(self.bucket.flat).mul_(self.weight.divisor)

    def arrived(self, call: str) -> None:
        """See `Round.arrived`; what was written is what means are taken of."""
        if call in ("synchronize()", "averaged()") and self.local.has_to_keep():
            with torch.no_grad():
                self.follow()

    def mean_source(self) -> torch.Tensor:
        """See `Round.mean_source`: the sum of numerators is that of the parameters, for weights sum to P."""
        return self._numerator + self._learned()

    def _learned(self) -> torch.Tensor:
        """Returns what steps have added to the parameters since they were set to n / w, whatever their dtype."""
        flat, numerator = self.bucket.flat, self._numerator
        before = (numerator / self.weight.divisor).to(flat.dtype)
        return flat.to(numerator.dtype) - before.to(numerator.dtype)

    def run(self, number: int) -> Iterator[Work]:
        """Steps 1 and 2; see `Round.run`."""
        self._numerator.add_(self._learned())
        # The buckets before have read the old weight by then.
        last = self.bucket.index == len(self.local.flat.buckets) - 1
        weight = self.weight.vector if last else None
        yield from self.mixer.exchange(self._numerator, number, self.exchange_number(number), weight)

    def merge(self, number: int) -> None:
        """See `Round.merge`."""
        self.mixer.terms(self._numerator, number).mix()

    def merged(self, number: int) -> None:
        """Step 3; see `Round.merged`: the weight that goes with all numerators came with the last one."""
        self.bucket.flat.copy_(self._numerator / self.weight.divisor)
