"""Exact means: by one all-reduce, or first inside nodes and then between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, HierarchicalAllReduce, ReduceOp, Work


class Mean(Exchange):
    """The exact mean, by one all-reduce."""

    one_collective = True
    has_memory = False
    keeps_means = True

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        yield self.communicator.all_reduce(self.bucket.whole, ReduceOp.AVG)


class HierarchicalMean(Exchange):
    """The exact mean, first inside nodes and then between them."""

    has_memory = False
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
