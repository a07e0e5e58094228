"""Accuracy after so many steps: each way is trained once for each seed, without a network, with threads as ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bagua_kernels import algorithms
from bagua_kernels.comm import Communicator, run_ranks
from bench.convergence.dealing import order_of
from bench.convergence.measure import evaluate, take_steps, wrap
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
    found, looks = [], {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}

    def look(taken: int) -> None:
        if taken in looks:
            images = slice(None) if taken == steps else slice(_SOME)
            found.append(_accuracy(algorithm, model, communicator, data.test_x[images], data.test_y[images]))

    take_steps(algorithm, optimizer, task, data, order[:, communicator.rank], after=look)
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
