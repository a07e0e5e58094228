"""Averages of two ranks beside training."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch

from bagua_kernels.algorithms.asynchronous.averages import Averages
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import ModelOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.comm.mailbox.pairwise import Encoded, PairwiseAverage
from bagua_kernels.comm.topology import Ring, Topology
from bagua_kernels.compression.codec import Codec, from_spec

_MOST_NEIGHBOURS = 8  # of a rank whose payloads are encoded: 64 bytes for each parameter


@register
class AsyncDecentralized(CourierAlgorithm):
    """Each rank averages with one neighbour after the other, and waits for none (AD-PSGD, Lian et al., ICML 2018).

    1. Take a step of the optimizer.
    2. Ask a neighbour with the model s, unless the last question has no answer yet.
    3. The neighbour answers with its model y, whatever it is doing, and later adds (s - y) / 2 to its model.
    4. Add (y - s) / 2 before the next pass after the answer.

    Any connected graph will do. The sum of all models stays the same, however late ranks are.

    Options and their defaults, all by keyword::

        topology=None          whose neighbours in its first step a rank asks; a `Ring` by default
        seed=0                 of the choices of neighbours
        codec=None             a codec or its spec; it encodes differences to references that both ends of an edge have
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

    name = "async_decentralized"
    refuses_tiers = "ranks average in pairs, of which none waits for the others of its node"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        topology: Topology | None = None,
        seed: int = 0,
        codec: Codec | str | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            topology: whose neighbours in its first step a rank asks; a `Ring` by default.
            seed: of the choices of neighbours.
            codec: a codec or its spec; it encodes differences to references that both ends of an edge have. None for full
                precision. A rank keeps two references for each neighbour, for both may ask: 8 bytes for each parameter.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: topologies differ, or do not join all ranks. Ranks are on GPUs. A rank has a codec and more than 8
                neighbours. Or as for `ModelAlgorithm`.
        """
        self.topology, self.seed = topology, seed
        self.codec: Codec | None = from_spec(codec) if isinstance(codec, str) else codec
        super().__init__(module, optimizer, **options)

    def averages_for(self, local: LocalModel) -> PairwiseAverages:
        """See `CourierAlgorithm.averages_for`."""
        if local.communicator.device.type != "cpu":
            raise ValueError(
                f"{type(self).__name__} needs messages that are matched by number, which NCCL does not have: take "
                "AsyncModelAverage or Wagma on GPUs"
            )
        topology = self.topology or Ring(local.communicator.size)
        topology.check(local.communicator)
        if self.codec is not None:
            _check_degrees(topology, local.communicator.size)
        return PairwiseAverages(local, topology, self.seed, self.codec)


def _check_degrees(topology: Topology, size: int) -> None:
    """Raises, on all ranks, if the references of one would take too much memory."""
    peers = [set(topology.neighbours_out(rank)) for rank in range(size)]
    for rank, own in enumerate(peers):
        for peer in own - {rank}:
            peers[peer].add(rank)
    most = max(range(size), key=lambda rank: len(peers[rank]))
    if len(peers[most]) > _MOST_NEIGHBOURS:
        raise ValueError(
            f"with a codec a rank keeps two references for each neighbour, 8 bytes for each parameter, and rank {most} has "
            f"{len(peers[most])} neighbours in {topology!r}, expected at most {_MOST_NEIGHBOURS}: take a topology with fewer, "
            "or leave out codec"
        )


class PairwiseAverages(Averages):
    """Asks a neighbour after each step."""

    def __init__(self, local: LocalModel, topology: Topology, seed: int, codec: Codec | None) -> None:
        """Makes the courier; collective.

        Args:
            local: as for `Loop`.
            topology: whose neighbours in its first step a rank asks.
            seed: of the choices of neighbours.
            codec: of what models differ from references; None for full precision.
        """
        super().__init__(local)
        rank = local.communicator.rank
        vectors = [bucket.flat for bucket in local.flat.buckets]
        self._encoded = None if codec is None else Encoded(codec, rank, vectors)
        neighbours = topology.neighbours_out(rank)
        self.average = self._pairwise = PairwiseAverage(
            self.courier, neighbours, self.model, seed=seed, wire=self._encoded
        )

    @property
    def has_references(self) -> bool:
        """See `Averages.has_references`."""
        return self._encoded is not None

    def set_references(self, vectors: list[torch.Tensor]) -> None:
        """See `Averages.set_references`."""
        if self._encoded is not None:
            self._encoded.restart(vectors)

    def after_step(self) -> None:
        """See `Averages.after_step`: step 2."""
        self._pairwise.start()

    def stats(self, stats: Stats) -> Stats:
        """See `Loop.stats`; rounds are questions of this rank that were answered."""
        return replace(super().stats(stats), rounds=self._pairwise.exchanges)
