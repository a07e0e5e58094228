"""Gossip steps without training: ranks get different parameters in the first step, and a learning rate of 0 afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import Topology
from tests.algorithms.gossip.common import BUCKET_BYTES, SHAPES, Case, Quadratic, flat
from tests.algorithms.training import Given
from tests.oracles.gossip import SGD, Floats

D = flat(Quadratic()).numel()


def spread(size: int, d: int = D, seed: int = 0) -> Floats:
    """Different parameters for each rank."""
    return np.random.default_rng([seed, size]).standard_normal((size, d)).astype(np.float32)


def gossiped(case: Case, start: Floats, steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> Floats:
    """Returns the parameters of all ranks after each of the steps that follow the first, shape (steps + 1, ranks, d).

    The first step is one of gradient descent from zero to `start`. Most algorithms mix its result in the same step.
    """

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Given(SHAPES, dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = case.make(module, optimizer, communicator, **{"bucket_bytes": BUCKET_BYTES, **options})
        seen = []
        for step in range(steps + 1):
            optimizer.zero_grad()
            gradient = torch.from_numpy(-start[communicator.rank] if step == 0 else np.zeros(D, np.float32)).to(dtype)
            parts = gradient.split([p.numel() for p in module.parameters()])
            shaped = {n: g.view(p.shape) for (n, p), g in zip(module.named_parameters(), parts, strict=True)}
            model(shaped).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.0
            model.wait()
            seen.append(flat(module).float())
        model.close()
        return seen

    everyone = run_ranks(len(start), rank)
    return np.stack([np.stack([x.numpy() for x in seen]) for seen in everyone], axis=1)


def expected(case: Case, topology: Topology, start: Floats, steps: int, dtype: Any = np.float32) -> Floats:
    """Returns what `gossiped` returns, from the simulation with the documented order of operations."""

    def gradient(rank: int, step: int, x: Floats) -> Floats:
        return np.asarray(-start[rank] if step == 0 else np.zeros_like(start[rank]), x.dtype)

    sgd = SGD(lambda step: 1.0 if step == 0 else 0.0)
    simulation = case.simulation(np.zeros(start.shape[1], dtype), topology.matrix, gradient, sgd)
    return np.stack([simulation.step() for _ in range(steps + 1)])
