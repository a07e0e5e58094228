"""Full-precision gradient averaging, the baseline of every comparison."""

from __future__ import annotations

from bagua_kernels.algorithms.algorithm import Algorithm, register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import ReduceOp


@register
class GradientAllReduce(Algorithm):
    """Synchronous data parallelism with exact means, as `DistributedDataParallel` does it.

    For each bucket of gradients, in the order in which backward completes them:

    1. All-reduce the bucket, in the gradients' own dtype, to the mean over all ranks.
    """

    name = "allreduce"

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        self._communicator.all_reduce(bucket.whole, ReduceOp.AVG).wait()
