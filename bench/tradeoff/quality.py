"""Accuracy after so many steps: each way is trained once for each seed, without a network, with threads as ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

from bagua_kernels import algorithms
from bagua_kernels.comm import Communicator, run_ranks
from bench.convergence.dealing import order_of
from bench.convergence.measure import evaluate, wrap
from bench.convergence.tasks import Data, Task
from bench.tradeoff.ways import Way

LOOKS = 20  # of a run, at the same distance
_SOME = 2000  # images of the test set that are looked at on the way; at the end it is all


def curve(way: Way, task: Task, data: Data, seed: int, steps: int) -> list[float]:
    """Accuracies at `LOOKS` points of a run, the last one on the whole test set; of means, where ranks differ."""
    torch.manual_seed(seed)
    start = task.model()
    order = order_of(len(data.x), task, steps, seed)
    return run_ranks(task.ranks, _train, way, task, start, data, order, timeout=600.0)[0]


def _train(
    communicator: Communicator, way: Way, task: Task, start: torch.nn.Module, data: Data, order: torch.Tensor
) -> list[float]:
    model = copy.deepcopy(start)
    steps = len(order)
    algorithm, optimizer = wrap(communicator, task, way.row, model, steps)
    rates, found = [group["lr"] for group in optimizer.param_groups], []
    looks = {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}
    for step, batch in enumerate(order[:, communicator.rank]):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step / steps)
        optimizer.zero_grad()
        F.cross_entropy(algorithm(data.x[batch]), data.y[batch]).backward()
        optimizer.step()
        if step + 1 in looks:
            images = slice(None) if step + 1 == steps else slice(_SOME)
            found.append(_accuracy(algorithm, model, communicator, data.test_x[images], data.test_y[images]))
    algorithm.close()
    return found


def _accuracy(
    algorithm: Any, model: torch.nn.Module, communicator: Communicator, x: torch.Tensor, y: torch.Tensor
) -> float:
    """On one rank, while the others wait: they share the processors."""
    if isinstance(algorithm, algorithms.ModelAlgorithm):
        with algorithm.averaged():
            return _on_first(model, communicator, x, y)
    return _on_first(model, communicator, x, y)


def _on_first(model: torch.nn.Module, communicator: Communicator, x: torch.Tensor, y: torch.Tensor) -> float:
    found = evaluate(model, x, y)[1] if communicator.rank == 0 else 0.0
    model.train()
    return float(communicator.broadcast_object(found))
