"""Full-precision gradient averaging, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.mean import HierarchicalMean, Mean
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, HierarchicalAllReduce, Nodes, ReduceOp


@register
class GradientAllReduce(GradientAlgorithm):
    """Synchronous data parallelism with exact means, as `DistributedDataParallel` does it.

    For each bucket of gradients, in the order in which backward completes them:

    1. All-reduce the bucket, in the gradients' own dtype, to the mean over all ranks. With `hierarchical`, first inside each
       node onto the owners of shards, then between nodes, and back (BAGUA, VLDB 2022, section 3.3).

    Options and their defaults, all by keyword::

        hierarchical=False       see step 1; each bucket then has connections of its own
        nodes=None               which ranks share a node; found from the environment if None
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
    """

    name = "allreduce"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hierarchical: bool = False,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        **options: Unpack[GradientOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            hierarchical: see step 1; each bucket then has connections of its own.
            nodes: which ranks share a node; found from the environment if None.
            **options: as for `GradientAlgorithm`.

        Raises:
            ValueError: hierarchical with several exchanges at a time, or as for `GradientAlgorithm`.
        """
        self.hierarchical = hierarchical
        self.nodes = nodes
        self._hierarchies: dict[tuple[int, torch.dtype], HierarchicalAllReduce] = {}
        # Process groups are made at the first exchange, and ranks must make them in one order.
        if hierarchical and options.setdefault("in_flight", 1) != 1:
            raise ValueError(
                f"hierarchical means are exchanged one at a time, got in_flight={options['in_flight']}: leave it out"
            )
        super().__init__(module, optimizer, **options)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        if self.hierarchical:
            if bucket.index == 0:
                self._close_hierarchies()  # buckets are laid out anew, with other sizes
            return HierarchicalMean(bucket, communicator, self._hierarchy)
        return Mean(bucket, communicator)

    def _hierarchy(self, communicator: Communicator, n: int, dtype: torch.dtype) -> HierarchicalAllReduce:
        if (n, dtype) not in self._hierarchies:
            made = HierarchicalAllReduce(communicator, n, dtype, nodes=self.nodes, op=ReduceOp.AVG)
            self._hierarchies[n, dtype] = made
        return self._hierarchies[n, dtype]

    def close(self) -> None:
        """See `Algorithm.close`."""
        self._close_hierarchies()
        super().close()

    def _close_hierarchies(self) -> None:
        for kind in list(self._hierarchies):
            self._hierarchies.pop(kind).close()
