"""Samplers for ranks: the public door to all that decides which rank is given which samples.

>>> from bagua_kernels.data import LoadBalancingDistributedSampler
>>> sampler = LoadBalancingDistributedSampler(texts, complexity=len)
>>> loader = DataLoader(texts, batch_size=32, sampler=sampler)

The two load-balancing samplers give all ranks the same work in each step, where samples differ in cost. `LengthCost` computes
costs from lengths. `RoundSampler` deals batches to ranks that take different numbers of steps in a round. `SharedEpoch` is the
base of your own sampler that all ranks share, and that resumes on any number of them. docs/loading.md shows their use.
"""

from bagua_kernels.algorithms.data.balanced_batches import LoadBalancingDistributedBatchSampler
from bagua_kernels.algorithms.data.balanced_sampler import LoadBalancingDistributedSampler
from bagua_kernels.algorithms.data.costs import Complexity, Dataset, LengthCost
from bagua_kernels.algorithms.data.round_sampler import RoundSampler
from bagua_kernels.algorithms.data.shared_epoch import SharedEpoch

__all__ = [
    "Complexity",
    "Dataset",
    "LengthCost",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "RoundSampler",
    "SharedEpoch",
]
