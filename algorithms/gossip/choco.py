"""Decentralized training with any codec: Choco-SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch

from bagua_kernels.algorithms.gossip.consensus_step import tuned
from bagua_kernels.algorithms.gossip.differences import DifferenceRound, Differences, Neighbourhood
from bagua_kernels.algorithms.gossip.mixing import Peers, sum_of_squares
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import RoundOptions
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.wrapping.verification import compare_copies
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work
from bagua_kernels.comm.topology import whole
from bagua_kernels.compression import Codec, Unbiased, decode_apply
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.gossip import ADDED, CHOCO, TOWARDS

_ROUNDING = 32 * 2.0**-24  # of float32, times what random roundings seldom come to


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

    Options and their defaults, all by keyword::

        codec='minmax_uint8'   a codec or its spec
        eta=None               the consensus step, above 0 and at most 1
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
            peers: as for `Decentralized`; the topology has one symmetric matrix.
            seed: of random numbers.
            **options: as for `RoundAlgorithm`.

        Raises:
            TypeError: as for `RoundAlgorithm`, or a value that should be a codec is not one.
            ValueError: `eta` or the topology does not fit, or as for `RoundAlgorithm`.
        """
        if eta is not None and not 0 < eta <= 1:
            raise ValueError(f"eta must be above 0 and at most 1, or None, got {eta=}")
        self.eta, self._chosen = eta, eta is None
        super().__init__(module, optimizer, codec=codec, peers=peers, seed=seed, **options)

    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """See `RoundAlgorithm.round_for`."""
        if self._chosen and bucket.index == 0:
            mine = tuned(self.codec, self._neighbourhood.topology) if local.communicator.rank == 0 else 0.0
            self.eta = float(local.communicator.broadcast_object(mine))
        assert self.eta is not None
        return PublicRound(local, bucket, self._neighbourhood, self.remedy, self.eta)

    @torch.no_grad()
    def _compare(self, steps: int) -> None:
        """See `RoundAlgorithm._compare`: how far neighbours are from this rank's public copy, but for rounding."""
        assert self.rounds is not None
        hood, own, gaps, least = self._neighbourhood, dict[str, float](), dict[str, float](), dict[str, float]()
        for each in self.rounds.all:
            assert isinstance(each, PublicRound)
            for name, span in zip(each.bucket.names, each.bucket.own, strict=True):
                public, gap = each.public[span], each.gap[span]
                # waits: once in verify_every steps.
                own[name], gaps[name] = float(public.sum(dtype=torch.float64)), float(gap.sum(dtype=torch.float64))
                # Of each of so many sums, elements are rounded once in each round, at random.
                spread = float(public.norm(dtype=torch.float64)) * (steps + 1) ** 0.5
                least[name] = _ROUNDING * spread + 1e-30
        weights = hood.by_rank(hood.weights)

        def first(originals: Mapping[int, Mapping[str, float]]) -> str:
            for name, gap in gaps.items():
                mean = sum(weight * originals[member][name] for member, weight in weights.items())
                if not abs(gap - (mean - own[name])) <= least[name]:
                    return f"{name!r} in what neighbours have sent"
            return ""

        compare_copies(self.communicator, hood.rank, own, first, steps)


class PublicRound(DifferenceRound):
    """Keeps the public copy of this rank's parameters, and how far the neighbours' are from it."""

    def __init__(self, local: LocalModel, bucket: Bucket, hood: Neighbourhood, remedy: str, eta: float) -> None:
        """Begins before the first round.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            hood: the neighbours.
            remedy: as for `DifferenceRound`.
            eta: the consensus step.
        """
        super().__init__(local, bucket, hood, remedy)
        bias = hood.codec.bias
        self._eta, self._factor = eta, 1 / (1 + bias.omega) if isinstance(bias, Unbiased) else 1.0
        self._own, self._gap = self.kept("own"), self.kept("gap")
        factors, self._divisor = whole(hood.by_rank(hood.weights))
        factors[hood.rank] -= self._divisor
        # As whole numbers, weights of what a rank sent sum to zero over all ranks.
        self._weights = list(factors.values())

    @property
    def public(self) -> torch.Tensor:
        """The public copy of this rank's parameters."""
        return self._own

    @property
    def gap(self) -> torch.Tensor:
        """The weighted mean of the neighbourhood's public copies, less this rank's."""
        return self._gap

    def restart(self) -> None:
        """See `Round.restart`."""
        self._own.copy_(self.bucket.flat)
        self._gap.zero_()

    def disagreement(self) -> tuple[float, int]:
        """See `Round.disagreement`; between this rank's public copy and the weighted mean of its neighbours'."""
        return sum_of_squares(self._gap[span] for span in self.bucket.own)

    def run(self, number: int) -> Iterator[Work]:
        """Steps 1 and 2; see `Round.run`."""
        yield from self.encode(number, CHOCO, [self.bucket.flat, self._own], [self._factor])
        scale = 1 / self._divisor
        decode_apply(self.hood.codec, self.payloads, ADDED, [self._gap], weights=self._weights, scale=scale)

    def merge(self, number: int) -> None:
        """Step 3; see `Round.merge`."""
        elementwise.apply(TOWARDS, [self.bucket.flat, self._gap], [self._eta])
