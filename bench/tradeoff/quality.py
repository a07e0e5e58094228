"""Metrics after so many steps: each way is trained once for each seed, without a network, with threads as ranks."""

from __future__ import annotations

from bench.convergence import measure
from bench.convergence.tasks import Data, Task
from bench.tradeoff.ways import Way


def curve(way: Way, task: Task, data: Data, seed: int, steps: int) -> list[float]:
    """Metrics of the test set on the way of a run, only the last one of all of it; of means, where ranks differ."""
    found = measure.run(task, way.row, data, steps, seed, looks=measure.LOOKS)
    return [metric for _, metric in found["points"]]
