"""Exact means by one all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.comm import ReduceOp, Work


class Mean(Exchange):
    """The exact mean, by one all-reduce."""

    one_collective = True
    has_memory = False
    keeps_means = True

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        yield self.communicator.all_reduce(self.bucket.whole, ReduceOp.AVG)
