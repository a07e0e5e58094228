"""Models train with each row and seed once, and rows are compared by pairs of the same seed: `--tasks resnet vgg …`.

    resnet      a residual network with batch norm on Fashion-MNIST, SGD with momentum
    vgg         convolutions before large matrices on Fashion-MNIST, SGD with momentum
    bert        a bidirectional encoder of text with masked characters, AdamW
    flights     tables of embeddings with sparse gradients, and a perceptron, on late flights; Adagrad
    speech      the language of spoken prompts of unequal length, dealt by the balanced sampler; AdamW

All rows of a seed begin with the same parameters and use the same examples in the same order. Losses and metrics are those of
the test set, of the mean model where ranks differ. Each run is in the file as soon as it has ended, and is not measured again.
Those of the first seed have losses and metrics on the way, too, of which `bench.tradeoff.models` makes seconds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from bench import speed
from bench.convergence import measure
from bench.convergence.models import MODELS, ROWS
from bench.convergence.report import cell, finite
from bench.convergence.row import BASELINE, Row
from bench.convergence.tasks import Task
from bench.models.data import Data
from bench.resume import Missing, Results

__all__ = ["MODELS", "ROWS", "missing", "settings_of", "summary", "table"]


def settings_of(task: Task, data: Data, steps: int) -> Results:
    """What all runs of a file have in common."""
    settings = {"steps": steps, "batch": task.batch, "ranks": task.ranks, "optimizer": task.optimizer}
    settings |= {"rate": task.rate, "momentum": task.momentum, "examples": len(data.x)}
    return settings | ({"data": data.digest} if data.digest else {})


def missing(part: Results, task: Task, rows: Sequence[Row], data: Data, seeds: int) -> Iterator[Missing]:
    """Yields the runs that are to be measured: all rows of a seed, and then those of the next.

    Args:
        part: settings and runs of this task; each measurement adds its run.
        task: to train on.
        rows: how.
        data: all of it.
        seeds: runs of each row.
    """

    def trained(row: Row, seed: int) -> None:
        began = time.process_time()
        looks = 1 if seed else measure.LOOKS
        run = measure.run(task, row, data, part["settings"]["steps"], seed, looks=looks)
        run |= {"cpu_seconds": time.process_time() - began, "machine": speed.machine()}
        part["runs"].setdefault(row.label, {})[str(seed)] = finite(run)

    for seed in range(seeds):
        for row in rows:
            if str(seed) not in part["runs"].get(row.label, {}):
                yield f"{task.name}: {row.label}, seed {seed}", lambda row=row, seed=seed: trained(row, seed)


def summary(part: Results, task: Task) -> list[dict[str, Any]]:
    """Returns for each row the means and deviations, and the differences to all-reduce by seed.

    Differences are those of the seeds that both have.
    """
    names = ("loss", task.metric_name)
    found = {
        label: {seed: {name: _number(run[name]) for name in names} for seed, run in runs.items()}
        for label, runs in part["runs"].items()
    }
    base, rows = found.get(BASELINE, {}), []
    for row in ROWS:
        if not (runs := found.get(row.label)):
            continue
        one: dict[str, Any] = {"label": row.label, "seeds": [int(seed) for seed in runs]}
        for name in names:
            values = [run[name] for run in runs.values()]
            one[name] = statistics.fmean(values)
            one[f"{name}_deviation"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            one[f"{name}_differences"] = [run[name] - base[seed][name] for seed, run in runs.items() if seed in base]
        raw = part["runs"][row.label].values()
        for name in ("seconds", "cpu_seconds"):
            one[name] = statistics.fmean(_number(run[name]) for run in raw)
        # Of the seeds that have them.
        sent = [run["bytes_per_step"] for run in raw if run["bytes_per_step"] is not None]
        one["bytes_per_step"] = statistics.fmean(sent) if sent else math.nan
        rows.append(one)
    return rows


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def table(task: Task, rows: Sequence[dict[str, Any]]) -> Table:
    """Returns what `summary` has found as a table; differences of the metric are in points, hundredths."""
    metric = task.metric_name
    grid = Table(title=f"{task.name}: {task.ranks} ranks, validation", title_justify="left")
    grid.add_column("")
    for heading in ("loss", "difference by seed", metric, "points by seed", "bytes a step", "s", "processor s"):
        grid.add_column(heading, justify="right")
    for one in rows:
        grid.add_row(
            one["label"],
            f"{cell(one['loss'], '.4f')} ± {cell(one['loss_deviation'], '.4f')}",
            " ".join(cell(each, "+.4f") for each in one["loss_differences"]),
            f"{cell(one[metric], '.4f')} ± {cell(one[f'{metric}_deviation'], '.4f')}",
            " ".join(cell(100 * each, "+.2f") for each in one[f"{metric}_differences"]),
            cell(one["bytes_per_step"], ",.0f"),
            cell(one["seconds"], ".0f"),
            cell(one["cpu_seconds"], ".0f"),
        )
    return grid
