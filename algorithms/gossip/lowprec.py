"""Decentralized training with few bits: DCD-PSGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.gossip.differences import DifferenceRound, Differences, Neighbourhood
from bagua_kernels.algorithms.gossip.mixing import Peers, sum_of_squares
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundOptions
from bagua_kernels.algorithms.models.round import Round, When
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.wrapping.verification import compare_copies, state_hash
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

    Options and their defaults, all by keyword::

        codec='minmax_uint8'   a codec or its spec
        peers='ring'           who mixes with whom: "all", "shift_one", "ring", "torus", "exponential",
                               "one_peer_exponential", "random", or a `Topology`, whose matrices are doubly stochastic;
                               the topology has one symmetric matrix
        seed=0                 of random numbers
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

    name = "lowprec"
    # BAGUA's.
    synonyms = MappingProxyType({"communication_interval": "interval"})

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
            peers: as for `Decentralized`; the topology has one symmetric matrix.
            seed: of random numbers.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or a value that should be a codec is not one.
            ValueError: the topology does not fit, or as for `RoundAlgorithm`.
        """
        self._made: list[ReplicaRound] = []
        super().__init__(module, optimizer, codec=codec, peers=peers, seed=seed, **options)

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        self._made.append(ReplicaRound(local, bucket, self._neighbourhood, self.remedy))
        return self._made[-1]

    @torch.no_grad()
    def _compare(self, steps: int) -> None:
        """See `RoundAlgorithm._compare`: replicas with what they are replicas of, bit by bit."""
        assert self.rounds is not None
        rows: dict[int, dict[str, int]] = {member: {} for member in self._neighbourhood.ranks}
        for each in self.rounds.all:
            assert isinstance(each, ReplicaRound)
            for member, row in self._neighbourhood.by_rank(each.rows).items():
                for name, span in zip(each.bucket.names, each.bucket.own, strict=True):
                    rows[member][name] = state_hash([row[span]])

        def first(originals: Mapping[int, Mapping[str, int]]) -> str:
            differing = ((n, m) for m, row in rows.items() for n, own in row.items() if originals[m][n] != own)
            return next((f"{name!r} in the replica of rank {member}" for name, member in differing), "")

        compare_copies(self.communicator, self._neighbourhood.rank, rows[self._neighbourhood.rank], first, steps)

    def replicas(self) -> dict[int, dict[int, torch.Tensor]]:
        """Returns copies of the replicas, by number of the bucket and by rank; padding between parameters is left out."""
        if self.rounds is not None:
            # Replicas are changed beside training.
            self.rounds.await_exchanges()
        return {each.bucket.index: each.replicas() for each in self._made}


class ReplicaRound(DifferenceRound):
    """Keeps replicas of this rank's and of its neighbours' parameters.

    A difference to parameters that were written from outside is large, and so is what the codec loses of it. In the rounds that
    follow a write, what a round has lacked is added in the next.
    """

    when = When.BEFORE_NEXT
    changes_beside = True

    def __init__(self, local: LocalModel, bucket: Bucket, hood: Neighbourhood, remedy: str) -> None:
        """Begins before the first round; arguments as for `DifferenceRound`."""
        super().__init__(local, bucket, hood, remedy)
        self._carries = 0  # rounds in which parameters that were written get what is still lacking
        self._rows = local.flat.rows(bucket, "replica of rank", hood.ranks)

    @property
    def rows(self) -> torch.Tensor:
        """The replicas of the neighbourhood's ranks, a row each."""
        return self._rows

    def restart(self) -> None:
        """See `Round.restart`."""
        self._rows.copy_(self.bucket.flat)

    def follow(self) -> None:
        """See `Round.follow`."""
        self._carries = _CARRIES
        self._rest.zero_()

    @property
    def _rest(self) -> torch.Tensor:
        return self.kept("rest")

    def run(self, number: int) -> Iterator[Work]:
        """See `Round.run`."""
        rows, flat = self._rows, self.bucket.flat
        self._carries = self.hood.members.most(self._carries)
        # The rule writes the new parameters, which are the new replica.
        steps = self.encode(number, DCD, [flat, rows[self.hood.place]], replicas=rows)
        if self._carries:
            target = self._target()
            encoded = next(steps)
            self._rest.copy_(target).sub_(flat)
            self._carries -= 1
            yield encoded
        yield from steps
        decode_add(self.hood.codec, self.payloads, rows)

    def numbers(self) -> dict[str, Any]:
        """See `Round.numbers`."""
        return {"carries": float(self._carries)} if self._carries else {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Round.load_numbers`."""
        self._carries = int(numbers.get("carries", 0))

    def _target(self) -> torch.Tensor:
        """Adds to the parameters what they lack, and returns what they would become without a codec, in float32."""
        hood, rows = self.hood, self._rows
        self.bucket.flat.add_(self._rest)
        mixed = weighted_sum(hood.by_rank(rows), hood.by_rank(hood.weights), torch.empty_like(rows[0]))
        return mixed.sub_(rows[hood.place]).add_(self.bucket.flat)

    def replicas(self) -> dict[int, torch.Tensor]:
        """Returns copies of the replicas, by rank; padding between parameters is left out."""
        return self.hood.by_rank(torch.cat([row[span] for span in self.bucket.own]) for row in self._rows)

    def disagreement(self) -> tuple[float, int] | None:
        """See `Round.disagreement`; between the first two ranks of the neighbourhood."""
        if len(self.hood.ranks) < 2:
            return None
        return sum_of_squares(self._rows[0, span] - self._rows[1, span] for span in self.bucket.own)
