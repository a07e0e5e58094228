"""Samplers whose ranks differ in what decides who draws what: an error on all ranks names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import comm
from bagua_kernels.algorithms import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
    LocalSGD,
    RoundSampler,
)
from bagua_kernels.algorithms.wrapping.agreement import ranks_of
from bagua_kernels.comm import Communicator, run_ranks
from tests.grids import folded

COSTS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def sampler(c: Communicator, costs: list[float] = COSTS, **options: Any) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(costs, costs, c.size, c.rank, communicator=c, **options)


def batches(c: Communicator, **options: Any) -> LoadBalancingDistributedBatchSampler:
    return LoadBalancingDistributedBatchSampler(sampler(c), **{"max_cost": 16, **options})


def rounds(c: Communicator, samples: int = 20, seed: int = 0) -> RoundSampler:
    net = nn.Linear(2, 2)
    return RoundSampler(samples, 2, LocalSGD(net, torch.optim.SGD(net.parameters()), communicator=c), seed=seed)


DIFFERENT: dict[str, Callable[[Communicator], object]] = {
    "costs": lambda c: sampler(c, [c.rank + 1.0, *COSTS[1:]]),
    "samples": lambda c: sampler(c, COSTS[c.rank :]),
    "seed": lambda c: sampler(c, seed=c.rank),
    "shuffle": lambda c: sampler(c, shuffle=c.rank == 0),
    "random_level": lambda c: sampler(c, random_level=c.rank / 2),
    "run": lambda c: sampler(c, run=2 + c.rank),
    "max_cost": lambda c: batches(c, max_cost=16 + c.rank),
    "max_samples": lambda c: batches(c, max_samples=2 + c.rank),
    "batch seed": lambda c: rounds(c, seed=c.rank),
    "round samples": lambda c: rounds(c, samples=20 + c.rank),
    # One rank refuses its own arguments, and the others are told.
    "drop_last": lambda c: sampler(c, run=c.rank),
}


@folded(what=list(DIFFERENT))
def test_all_ranks_are_told_what_differs(what: str) -> None:
    def rank(c: Communicator) -> None:
        name = what.split()[-1] if what != "drop_last" else "run has to be at least 1"
        with pytest.raises(ValueError, match=name):
            DIFFERENT[what](c)

    run_ranks(2, rank)


def test_equal_ones_are_made() -> None:
    def rank(c: Communicator) -> list[int]:
        batches(c)
        rounds(c)
        return list(sampler(c))

    drawn = run_ranks(2, rank)
    assert sorted([*drawn[0], *drawn[1]]) == list(range(8))


def test_the_job_is_asked_unless_ranks_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(c: Communicator) -> None:
        if c.rank == 0:
            # One of several in one process: nobody else makes it.
            LoadBalancingDistributedSampler(COSTS, COSTS, 2, 0)

    run_ranks(2, rank)
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    monkeypatch.setattr(comm, "world", lambda: "the world")

    assert ranks_of(None, None) == "the world"
    assert ranks_of(2, 0) is None
