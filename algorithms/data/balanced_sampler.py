"""Deals samples of similar cost to all ranks at the same time."""

from __future__ import annotations

import numpy as np
import torch

from bagua_kernels.algorithms.data.costs import Complexity, Dataset, costs_of
from bagua_kernels.algorithms.data.order import CostOrder, Indices, run_of, shuffle_runs
from bagua_kernels.algorithms.data.shared_epoch import SharedEpoch
from bagua_kernels.algorithms.wrapping.agreement import agreed, ranks_of
from bagua_kernels.comm import Communicator
from bagua_kernels.options import checked


class LoadBalancingDistributedSampler(SharedEpoch[int, Indices]):
    """A `DistributedSampler` whose ranks get samples of similar cost in the same step (BAGUA, `load_balancing_data_loader`).

    1. Sort all samples by cost; `random_level` moves them by a random part of all places.
    2. Cut the order into runs of neighbours, and shuffle the runs.
    3. Sample `ranks * step + rank` belongs to a rank's step.

    The order is a function of seed and epoch alone. Each sample comes once; with `drop_last=False` the last ones come again
    where the number of ranks does not divide them. Steps are balanced best where the number of ranks divides `run`.
    """

    @checked
    def __init__(
        self,
        dataset: Dataset,
        complexity: Complexity,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
        run: int | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        """Learns all costs; collective where there is a communicator.

        Args:
            dataset: with a length, equal on all ranks.
            complexity: a function of a sample that returns its cost, or a column's name, or the costs of all samples.
                `LengthCost` computes costs from lengths.
            num_replicas: number of ranks; of `torch.distributed` or of the launcher if None, and 1 without either.
            rank: of this process, likewise.
            shuffle: False for ascending costs in each epoch.
            seed: equal on all ranks.
            drop_last: leave the last samples out where the number of ranks does not divide them.
            random_level: from 0, best balance, to 1, random order.
            run: samples of similar cost that stay together. By default the largest of 24 to 960 that leaves a hundred runs.
            communicator: of the ranks, which compare costs and options. That of `comm.init()` if None, provided it was called,
                and neither `num_replicas` nor `rank` is given.

        Raises:
            TypeError: the dataset has no length.
            ValueError: there are not as many costs as samples, or one is not positive and finite. Or there are too few samples
                for `drop_last`, or a number is out of its range. Or costs or options differ between ranks.
        """
        super().__init__(num_replicas, rank, seed)
        self.communicator = ranks_of(num_replicas, rank) if communicator is None else communicator
        with agreed(type(self).__name__, self.communicator) as own:
            self.costs = costs_of(dataset, complexity)
            samples = len(self.costs)
            if not samples or (drop_last and samples < self.num_replicas):
                raise ValueError(
                    f"expected a sample for each of {self.num_replicas} ranks, got {samples}: set drop_last=False"
                )
            if not 0 <= random_level <= 1:
                raise ValueError(f"random_level has to be from 0 to 1, got {random_level}")
            self.run = run_of(samples) if run is None else run
            if self.run < 1:
                raise ValueError(f"run has to be at least 1, got {run}")
            self.shuffle, self.drop_last, self.random_level = shuffle, drop_last, random_level
            self._by_cost = CostOrder(self.costs, random_level if shuffle else 0.0)
            own.update(samples=samples, costs=torch.from_numpy(self.costs), seed=seed, num_replicas=self.num_replicas)
            own.update(shuffle=shuffle, drop_last=drop_last, random_level=random_level, run=self.run)

    def by_cost(self, epoch: int) -> tuple[Indices, np.random.Generator]:
        """Returns an epoch's samples in ascending order of cost, about, and a generator for what is drawn next."""
        generator = np.random.default_rng((self.seed, epoch))
        if not self.shuffle:
            return self._by_cost.plain, generator
        return self._by_cost.draw(generator), generator

    def draw(self, epoch: int) -> Indices:
        """See `SharedEpoch.draw`; all samples, shape (samples,)."""
        order, generator = self.by_cost(epoch)
        return shuffle_runs(order, self.run, generator) if self.shuffle else order

    def level(self, items: Indices, ranks: int, begun: bool = False) -> Indices:
        """Leaves the last samples out, or repeats them."""
        rest = len(items) % ranks
        if not rest:
            return items
        if self.drop_last:
            return items[: len(items) - rest]
        # Those before the end cost about as much as the last. A few samples for many ranks come more often.
        again = np.resize(items[::-1], ranks - rest)
        return np.concatenate([items, again])

    def unchanged(self, items: Indices, levelled: Indices) -> int:
        """See `SharedEpoch.unchanged`."""
        return min(len(items), len(levelled))

    def item(self, items: Indices, index: int) -> int:
        """See `SharedEpoch.item`."""
        return int(items[index])
