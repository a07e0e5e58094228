"""Metrics after so many steps: each way is trained once for each seed, without a network, with threads as ranks."""

from __future__ import annotations

from bench.convergence.measure import run
from bench.convergence.tasks import Data, Task
from bench.tradeoff.ways import Way

LOOKS = 20  # of a run, at the same distance


def curve(way: Way, task: Task, data: Data, seed: int, steps: int) -> list[float]:
    """Metrics of the test set at `LOOKS` points of a run, only the last one of all of it; of means, where ranks differ."""
    return [metric for _, metric in run(task, way.row, data, steps, seed, looks=LOOKS)["points"]]
