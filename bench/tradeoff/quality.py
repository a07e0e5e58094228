"""Loss and metric after so many steps: each way is trained once for each seed, without a network, with threads as ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bagua_kernels import algorithms
from bagua_kernels.comm import Communicator, run_ranks
from bench.convergence.dealing import deal
from bench.convergence.measure import evaluate, make_dense, take_steps, wrap
from bench.convergence.row import Row
from bench.convergence.tasks import Data, Task
from bench.tradeoff.ways import Way

LOOKS = 20  # of a run, at the same distance
_SOME = 2000  # examples of the test set that are looked at on the way; at the end it is all

Point = tuple[float, float]


def curve(way: Way, task: Task, data: Data, seed: int, steps: int) -> list[float]:
    """Metrics at `LOOKS` points of a run, see `points`."""
    return [metric for _, metric in points(way.row, task, data, seed, steps)]


def points(row: Row, task: Task, data: Data, seed: int, steps: int) -> list[Point]:
    """Losses and metrics at `LOOKS` points of a run, the last one on the whole test set; of means, where ranks differ."""
    torch.manual_seed(seed)
    start = task.model()
    order = deal(data, task, steps, seed)
    return run_ranks(task.ranks, _train, row, task, start, data, order, timeout=600.0)[0]


def _train(
    communicator: Communicator, row: Row, task: Task, start: torch.nn.Module, data: Data, order: torch.Tensor
) -> list[Point]:
    model = copy.deepcopy(start)
    if row.dense:
        make_dense(model)
    steps = len(order)
    algorithm, optimizer = wrap(communicator, task, row, model, steps)
    found, looks = [], {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}

    def look(taken: int) -> None:
        if taken in looks:
            found.append(_point(task, algorithm, model, communicator, data, None if taken == steps else _SOME))

    take_steps(algorithm, optimizer, task, data, order[:, communicator.rank], after=look)
    algorithm.close()
    return found


def _point(
    task: Task, algorithm: Any, model: torch.nn.Module, communicator: Communicator, data: Data, most: int | None
) -> Point:
    """On one rank, while the others wait: they share the processors."""
    if isinstance(algorithm, algorithms.ModelAlgorithm):
        with algorithm.averaged():
            return _on_first(task, model, communicator, data, most)
    return _on_first(task, model, communicator, data, most)


def _on_first(task: Task, model: torch.nn.Module, communicator: Communicator, data: Data, most: int | None) -> Point:
    found = evaluate(task, model, data.test_x, data.test_y, most) if communicator.rank == 0 else (0.0, 0.0)
    model.train()
    first: Point = communicator.broadcast_object(found)
    return first
