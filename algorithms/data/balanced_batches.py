"""Batches of equal cost and different sizes, dealt to all ranks at the same time."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import numpy as np

from bagua_kernels.algorithms.data.balanced_sampler import LoadBalancingDistributedSampler
from bagua_kernels.algorithms.data.order import Costs, Indices, run_of, shuffle_runs
from bagua_kernels.algorithms.data.shared_epoch import SharedEpoch
from bagua_kernels.algorithms.wrapping.agreement import agreed
from bagua_kernels.options import FloatOrInf, checked

Batches: TypeAlias = "list[Indices]"


class LoadBalancingDistributedBatchSampler(SharedEpoch[list[int], Batches]):
    """Batches that cost almost the same, from samples of similar cost: pass it to a `DataLoader` as `batch_sampler`.

    1. Take the samples in ascending order of cost, as the sampler draws it for the epoch.
    2. Fill one batch after the other until the next sample would exceed `max_cost`. The first one is filled in part only, so
       that batches begin elsewhere in each epoch.
    3. Shuffle runs of batches whose costs are nearest, as the sampler does with samples. The two that are not full come last.
    4. Halve as many of the last batches as it takes until the number of ranks divides their number.

    Batches have different sizes. Call `model.weigh(len(batch))` before the forward pass, so that gradients are the mean over
    samples and not over batches. No batch exceeds `max_cost`, and all ranks take as many steps. Each sample comes once, but where
    batches of one sample, which cannot be halved, are fewer than ranks.
    """

    @checked
    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        max_cost: FloatOrInf,
        *,
        padded: bool = True,
        max_samples: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Takes costs, ranks, seed and epoch from a sampler.

        Args:
            sampler: of samples.
            max_cost: of a batch, in the unit of the costs.
            padded: True if each sample costs as much as the batch's largest; else a batch costs the sum of its samples.
            max_samples: of a batch; any number if None.
            drop_last: leave out batches that are not full, and those that the number of ranks does not divide, instead of
                halving some.

        Raises:
            ValueError: a sample alone costs more than `max_cost`, `max_samples` is below 1, or there are fewer samples than
                ranks. Or options differ between ranks, which are compared as the sampler's.
        """
        self.sampler, epoch = sampler, sampler.epoch
        super().__init__(sampler.num_replicas, sampler.rank, sampler.seed)
        self.set_epoch(epoch)
        with agreed(type(self).__name__, sampler.communicator) as own:
            costs = sampler.costs
            largest = int(costs.argmax())
            if not costs[largest] <= max_cost:
                raise ValueError(
                    f"sample {largest} alone costs {costs[largest]}, more than max_cost={max_cost}: raise max_cost, or leave "
                    f"such samples out (there are {int((costs > max_cost).sum())})"
                )
            if max_samples is not None and max_samples < 1:
                raise ValueError(f"max_samples has to be at least 1, got {max_samples}")
            if len(costs) < self.num_replicas:
                raise ValueError(f"expected a sample for each of {self.num_replicas} ranks, got {len(costs)}")
            self.max_cost, self.padded, self.drop_last = max_cost, padded, drop_last
            self.max_samples = len(costs) if max_samples is None else max_samples
            own.update(max_cost=max_cost, padded=padded, max_samples=max_samples, drop_last=drop_last)

    @property
    def epoch(self) -> int:
        """That of the sampler, which some trainers set instead."""
        return self.sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def draw(self, epoch: int) -> Batches:
        """See `SharedEpoch.draw`."""
        order, generator = self.sampler.by_cost(epoch)
        shuffled = self.sampler.shuffle
        ends = self._ends(self.sampler.costs[order], generator.random() if shuffled else 1.0)
        batches = np.split(order, ends[:-1])
        partial = [batches.pop()] + ([batches.pop(0)] if shuffled and len(ends) > 1 else [])
        if shuffled and batches:
            # Even full batches differ by part of a sample.
            by_cost = np.argsort([self._cost(batch) for batch in batches], kind="stable")
            batches = [batches[place] for place in shuffle_runs(by_cost, run_of(len(batches)), generator)]
        # Few samples are better shared out than left out.
        return batches if self.drop_last and len(batches) >= self.num_replicas else [*batches, *partial]

    def _cost(self, batch: Indices) -> float:
        costs = self.sampler.costs[batch]
        return float(costs.max() * len(costs) if self.padded else costs.sum())

    def _ends(self, costs: Costs, part: float) -> list[int]:
        """Fills batches; returns where each ends.

        Args:
            costs: in about ascending order.
            part: of `max_cost`, and of `max_samples`, for the first batch.
        """
        ends: list[int] = []
        begin, cap, most = 0, max(part * self.max_cost, costs[0]), max(1, round(part * self.max_samples))
        while begin < len(costs):
            begin += self._fitting(costs[begin : begin + most], cap)
            ends.append(begin)
            cap, most = self.max_cost, self.max_samples
        return ends

    def _fitting(self, costs: Costs, cap: float) -> int:
        """How many of these samples a batch holds: the first one at least."""
        # Of ascending costs no more fit than of the first one's. Costs that were moved at random need a further look.
        looked = int(min(cap / costs[0], len(costs))) + 1
        while True:
            some = costs[:looked]
            sums = np.maximum.accumulate(some) * np.arange(1, len(some) + 1) if self.padded else np.cumsum(some)
            fitting = int(np.searchsorted(sums, cap, side="right"))
            if fitting < len(some) or len(some) == len(costs):
                return max(1, fitting)
            looked *= 2

    def level(self, items: Batches, ranks: int, begun: bool = False) -> Batches:
        """Halves batches from the end on, or leaves the last ones out; a few single samples for many ranks come again."""
        rest = len(items) % ranks
        if not rest:
            return items
        # Of an epoch with fewer batches than ranks some are halved; at the end of another one they are those to be left out.
        if self.drop_last and (begun or len(items) > rest):
            return items[: len(items) - rest]
        missing, tail = ranks - rest, []
        kept = list(items)
        while missing and kept:
            last = kept.pop()
            parts = np.array_split(last, min(len(last), missing + 1))
            missing -= len(parts) - 1
            tail += parts
        again = [tail[place % len(tail)] for place in range(missing)]
        return [*kept, *tail, *again]

    def unchanged(self, items: Batches, levelled: Batches) -> int:
        """See `SharedEpoch.unchanged`."""
        both = zip(items, levelled, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], both))

    def item(self, items: Batches, index: int) -> list[int]:
        """See `SharedEpoch.item`."""
        return [int(one) for one in items[index]]
