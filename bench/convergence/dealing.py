"""Which examples each rank sees at each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from bagua_kernels.data import LoadBalancingDistributedSampler
from bench.convergence.tasks import Data, Task


def deal(data: Data, task: Task, steps: int, seed: int) -> torch.Tensor:
    """Draws the examples of all steps and ranks, shape (steps, ranks, batch), by their costs where they have some."""
    if data.costs is None:
        return order_of(len(data.x), task, steps, seed)
    return order_by_cost(data.costs, task, steps, seed)


def order_of(examples: int, task: Task, steps: int, seed: int) -> torch.Tensor:
    """Draws the examples of all steps and ranks, shape (steps, ranks, batch): each once before any comes again."""
    # Of its own: PyTorch's global generator is shared by all threads, in whatever order they come.
    generator = torch.Generator().manual_seed(seed)
    each = task.ranks * task.batch
    passes = -(-steps // (examples // each))
    orders = [torch.randperm(examples, generator=generator)[: examples // each * each] for _ in range(passes)]
    return torch.cat(orders)[: steps * each].view(steps, task.ranks, task.batch)


def order_by_label(labels: torch.Tensor, task: Task, steps: int, seed: int) -> torch.Tensor:
    """As `order_of`, but each rank sees only its own part of the examples, which are sorted by label.

    Parts are of one size; what is left at the end is seen by nobody.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(labels) // task.ranks
    parts = labels.argsort(stable=True)[: size * task.ranks].view(task.ranks, size)
    kept = size // task.batch * task.batch
    passes = -(-steps * task.batch // kept)
    ranks = []
    for part in parts:
        orders = [part[torch.randperm(size, generator=generator)[:kept]] for _ in range(passes)]
        ranks.append(torch.cat(orders)[: steps * task.batch].view(steps, task.batch))
    return torch.stack(ranks, dim=1)


def order_by_cost(costs: torch.Tensor, task: Task, steps: int, seed: int) -> torch.Tensor:
    """As `order_of`, but with the balanced sampler: in each step the batches of all ranks cost about the same."""
    ranks = []
    for rank in range(task.ranks):
        sampler = LoadBalancingDistributedSampler(
            costs.tolist(), costs.tolist(), num_replicas=task.ranks, rank=rank, seed=seed, drop_last=True
        )
        ranks.append(torch.tensor([*itertools.islice(_forever(sampler), steps * task.batch)]).view(steps, task.batch))
    return torch.stack(ranks, dim=1)


def _forever(sampler: LoadBalancingDistributedSampler) -> Iterator[int]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from sampler
