"""Full-precision gradient averaging, the baseline of every comparison."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator


@register
class GradientAllReduce(GradientAlgorithm):
    """Synchronous data parallelism with exact means, as `DistributedDataParallel` does it.

    For each bucket of gradients, in the order in which backward completes them:

    1. All-reduce the bucket, in the gradients' own dtype, to the mean over all ranks. With `hierarchical`, first inside each
       node onto the owners of shards, then between nodes, and back (BAGUA, VLDB 2022, section 3.3).

    Options and their defaults, all by keyword::

        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        hierarchical=None        True to average inside nodes in full precision first, and then between them; False for
                                 never; None where nodes have several ranks
        nodes=None               which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
        verify_every=None        steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'       "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "allreduce"

    def _averages_nodes(self, device: torch.device) -> bool | None:
        """See `Algorithm._averages_nodes`: the sums of GPUs take the way of their links by themselves."""
        return False if device.type == "cuda" else None

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        # A communicator in two tiers is for other exchanges, where these are tried in turns with them.
        return Mean(bucket, communicator.flat if self.hierarchical is False else communicator)
