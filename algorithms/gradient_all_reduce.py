"""Full-precision gradient averaging, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.engine.exchange import Exchange
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, HierarchicalAllReduce, Nodes, ReduceOp, Work


@register
class GradientAllReduce(GradientAlgorithm):
    """Synchronous data parallelism with exact means, as `DistributedDataParallel` does it.

    For each bucket of gradients, in the order in which backward completes them:

    1. All-reduce the bucket, in the gradients' own dtype, to the mean over all ranks. With `hierarchical`, first inside each
       node onto the owners of shards, then between nodes, and back (BAGUA, VLDB 2022, section 3.3).
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
            ValueError: hierarchical with several lanes, or as for `GradientAlgorithm`.
        """
        self.hierarchical = hierarchical
        self.nodes = nodes
        self._hierarchies: dict[tuple[int, torch.dtype], HierarchicalAllReduce] = {}
        # Process groups are made at the first exchange, and ranks must make them in one order.
        if hierarchical and options.setdefault("lanes", 1) != 1:
            raise ValueError(f"hierarchical means have one lane, got lanes={options['lanes']}: leave it out")
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


class Mean(Exchange):
    """The exact mean, by one all-reduce."""

    one_collective = True
    has_memory = False
    takes_memory = True
    keeps_means = True

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        yield self.communicator.all_reduce(self.bucket.whole, ReduceOp.AVG)


class HierarchicalMean(Exchange):
    """The exact mean, first inside nodes and then between them."""

    has_memory = False
    takes_memory = True
    keeps_means = True

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        hierarchy: Callable[[Communicator, int, torch.dtype], HierarchicalAllReduce],
    ) -> None:
        """Takes what finds or makes the all-reduce of a number of elements and a dtype; making one is collective."""
        super().__init__(bucket, communicator)
        self._hierarchy = hierarchy

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        whole = self.bucket.whole
        yield from self._hierarchy(self.communicator, whole.numel(), whole.dtype).steps(whole)
