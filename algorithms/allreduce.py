"""Full-precision gradient averaging, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import HierarchicalAllReduce, Nodes, ReduceOp, Work


@register
class GradientAllReduce(Algorithm):
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
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            hierarchical: see step 1; each bucket then has connections of its own.
            nodes: which ranks share a node; found from the environment if None.
            **arguments: as for `Algorithm`.

        Raises:
            ValueError: hierarchical with several lanes, or as for `Algorithm`.
        """
        self.hierarchical = hierarchical
        self.nodes = nodes
        self._hierarchies: dict[tuple[int, torch.dtype], HierarchicalAllReduce] = {}
        # Process groups are made at the first exchange, and ranks must make them in one order.
        if hierarchical and arguments.setdefault("lanes", 1) != 1:
            raise ValueError(f"hierarchical means have one lane, got lanes={arguments['lanes']}: leave it out")
        super().__init__(module, optimizer, **arguments)

    @property
    def adopts(self) -> bool:
        """See `Algorithm.adopts`; a subclass may remember where a bucket's memory is."""
        return type(self).exchange is GradientAllReduce.exchange

    @property
    def waits(self) -> bool:
        """See `Algorithm.waits`."""
        return type(self).exchange is GradientAllReduce.exchange and not self.hierarchical

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        if self.hierarchical:
            self._hierarchy(bucket)(bucket.whole)
        else:
            self._all_reduce(bucket).wait()

    def start(self, bucket: Bucket, step: int) -> Callable[[], None] | None:
        """See `Algorithm.start`."""
        return self._all_reduce(bucket).wait if self.waits else super().start(bucket, step)

    def _all_reduce(self, bucket: Bucket) -> Work:
        return self.lane(bucket).all_reduce(bucket.whole, ReduceOp.AVG)

    def _hierarchy(self, bucket: Bucket) -> HierarchicalAllReduce:
        kind = (bucket.whole.numel(), bucket.whole.dtype)
        if kind not in self._hierarchies:
            self._hierarchies[kind] = HierarchicalAllReduce(self.lane(bucket), *kind, nodes=self.nodes, op=ReduceOp.AVG)
        return self._hierarchies[kind]

    def forget(self) -> None:
        """See `Algorithm.forget`."""
        for kind in list(self._hierarchies):
            self._hierarchies.pop(kind).close()

    def close(self) -> None:
        """See `Algorithm.close`."""
        try:
            if self._engine is not None:
                self._engine.complete()
        finally:
            self.forget()
            super().close()
