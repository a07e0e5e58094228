"""Seconds until a model is as good as with all-reduce: `python -m bench.tradeoff.models --tasks resnet [--output FILE]`.

1. Each row trains once without a network: losses and metrics by steps. `--trained` holds those of `bench.convergence`, which are
   taken from there. So does what `AutoTune` has chosen on a network.
2. Each takes steps on four emulated hosts, in turns, for each network: seconds of a step.
3. Steps until the goal, times seconds of a step, is the time that counts.

There are two goals: all-reduce's final loss and one percent more, and its final metric less half a point. Rows are those of
`python -m bench.convergence`, of one seed; all-reduce stands for `DistributedDataParallel`. All is written as soon as it is
measured: what is in the file is not measured again. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from bagua_kernels import algorithms
from bagua_kernels.compression.codec import parse_spec
from bench import resume, speed
from bench.convergence import measure, paired
from bench.convergence.dealing import deal
from bench.convergence.measure import wanted
from bench.convergence.models import MODELS, ROWS
from bench.convergence.row import BASELINE, Row
from bench.convergence.tasks import Data, Task
from bench.netlab import lab as netlab
from bench.resume import Missing, Results
from bench.tradeoff import report
from bench.tradeoff.ways import Cell, Kind, Way
from bench.training.measure import run

HOSTS, SEED = 4, 0
TRAINED = Path("bench/results/models.json")
RATES = (100.0, 1000.0)  # Mbit/s
BATCHES = 16  # of each rank, which steps on hosts use in turn
LOSS_MARGIN = 0.01  # of all-reduce's final loss
# What rows change beside the bytes, and steps of which one exchanges parameters: those of the classes by default.
KINDS: dict[str, tuple[Kind, int]] = {
    BASELINE: ("exact", 1),
    "all-reduce, dense": ("exact", 1),
    "Decentralized": ("neighbours", 1),
    "DiLoCo": ("local", 30),
    "SparseLoCo": ("local", 30),
    "MuLoCo": ("local", 30),
    "Wagma": ("asynchronous", 10),
}


TUNER = Way("AutoTune, any", "chosen", Row("AutoTune, any", algorithms.AutoTune, {"exactness": "any"}))


def ways(model: str) -> list[Way]:
    """The rows of a model as ways to train, and a tuner that may choose anything."""
    rows = [row for row in ROWS if model in row.tasks]
    kinds = [KINDS.get(row.label, ("synchronous", 1)) for row in rows]
    return [Way(row.label, kind, row, interval=every) for row, (kind, every) in zip(rows, kinds, strict=True)] + [TUNER]


def chosen_by_tuner(spec: str) -> Row:
    """What a tuner has chosen, as a row to be trained."""
    kind, options = parse_spec(spec)
    return Row(f"{TUNER.name}: {spec}", algorithms.Algorithm.registered[kind], options)


def batches(task: Task, data: Data) -> list[list[tuple[Any, torch.Tensor]]]:
    """The first batches of each rank: inputs and labels."""
    order = deal(data, task, BATCHES, SEED)
    return [[(data.x[own], data.y[own]) for own in order[:, rank]] for rank in range(task.ranks)]


def missing(part: Results, task: Task, chosen: Sequence[Way], rates: Sequence[float], data: Data) -> Iterator[Missing]:
    """Yields what is to be measured yet, each with its name.

    Args:
        part: settings, curves and seconds of this task, to which each measurement adds.
        task: with the model.
        chosen: ways to train.
        rates: of links, Mbit/s.
        data: all of it.
    """

    def trained(row: Row) -> None:
        found = measure.run(task, row, data, part["settings"]["steps"], SEED, looks=measure.LOOKS)
        part["curves"][row.label] = found["points"]

    def timed(rate: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/batches.pt"
            torch.save(batches(task, data), file)
            settings = {"model": task.name, "ways": [way.name for way in chosen], "batches": file}
            settings |= {"cells": [dataclasses.asdict(Cell(rate, batch=task.batch))], "tunings": part["tunings"]}
            told = run(HOSTS, "model", settings, module="bench.tradeoff.hosts")
        part["tunings"] = told["tunings"]
        (row,) = told["rows"]
        part["cells"][f"{rate:g}"] = {**row, "load_average": told["load_average"]}

    rows = [way.row for way in chosen if way != TUNER]
    rows += [
        chosen_by_tuner(spec)
        for spec in sorted({cell["chosen"] for cell in part["cells"].values() if "chosen" in cell})
    ]
    for row in rows:
        if row.label not in part["curves"]:
            yield f"{task.name}: {row.label}, quality", partial(trained, row)
    names = {way.name for way in chosen}
    for rate in rates:
        # All in one start, so that they are measured in turns.
        if not names <= {*part["cells"].get(f"{rate:g}", {"seconds": {}})["seconds"]}:
            yield f"{task.name}: {rate:g} Mbit/s", partial(timed, rate)


def take(part: Results, trained: Results) -> None:
    """Takes the curves that `bench.convergence` has, of runs with the same settings, into this task's part."""
    alike = {"seed": SEED, "hosts": HOSTS, **trained.get("settings", {})} == part["settings"]
    for label, runs in trained.get("runs", {}).items() if alike else ():
        if points := runs.get(str(SEED), {}).get("points"):
            part["curves"].setdefault(label, points)


def summary(part: Results) -> list[dict[str, Any]]:
    """Returns for each network and row the seconds of a step, and until each goal; None for a goal that is not reached."""
    steps, rows = part["settings"]["steps"], []
    base = part["curves"][BASELINE]
    for cell in part["cells"].values():
        curves = {name: part["curves"].get(curve_of(name, cell)) for name in cell["seconds"]}
        for name, own in curves.items():
            if own is None:
                continue
            step = statistics.median(cell["seconds"][name])
            found = {"rate": cell["rate"], "row": name, "seconds_per_step": step}
            found |= {"chosen": cell["chosen"]} if name == TUNER.name else {}
            for place, (goal, sign, margin) in enumerate(
                [("loss", -1.0, LOSS_MARGIN * base[-1][0]), ("metric", 1.0, report.HALF_A_POINT)]
            ):
                points, plain = ([sign * point[place] for point in curve] for curve in (own, base))
                there = points[-1] >= plain[-1] - margin
                taken = report.steps_beside(points, plain, steps, margin) if there else None
                found |= {f"steps_{goal}": taken, f"seconds_{goal}": None if taken is None else taken * step}
            rows.append(found)
    return rows


def curve_of(name: str, cell: Results) -> str:
    """Which curve belongs to a row: a tuner's is that of what it has chosen on this network."""
    return chosen_by_tuner(cell["chosen"]).label if name == TUNER.name else name


def table(task: Task, rows: Sequence[dict[str, Any]]) -> Table:
    """Returns what `summary` has found as a table; "times" is all-reduce's time over the row's."""
    grid = Table(title=f"{task.name}: seconds until all-reduce's final values, {HOSTS} hosts", title_justify="left")
    for heading in ("Mbit/s", "row", "ms per step", "s to its loss", "times", f"s to its {task.metric_name}", "times"):
        grid.add_column(heading, justify="left" if heading == "row" else "right")
    for one in rows:
        base = next(each for each in rows if each["rate"] == one["rate"] and each["row"] == BASELINE)
        cells = []
        for goal in ("seconds_loss", "seconds_metric"):
            own = one[goal]
            cells += ["–", "–"] if own is None else [f"{own:.1f}", f"{base[goal] / own:.2f}"]
        grid.add_row(f"{one['rate']:g}", one["row"], f"{1000 * one['seconds_per_step']:.1f}", *cells)
    return grid


def main() -> int:
    """Reads the command line, measures what is missing, and prints tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tradeoff.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=MODELS, default=list(MODELS), help="models; all by default")
    parser.add_argument("--rows", nargs="+", metavar="NAMES", help="labels of rows, or parts of them; all by default")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="Mbit/s")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="JSON file of bench.convergence, with curves")
    parser.add_argument("--output", type=Path, help="JSON file, from which a study goes on")
    options = parser.parse_args()
    if reason := netlab.available(delay=False):
        print(reason, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    console, results, trained = speed.console(), resume.read(options.output), resume.read(options.trained)
    for name in options.tasks:
        task = MODELS[name]
        data, labels = task.data(), {row.label for row in wanted(task, options.rows, ROWS)} | {TUNER.name}
        settings = {**paired.settings_of(task, data, options.steps or task.steps), "seed": SEED, "hosts": HOSTS}
        empty: Results = {"curves": {}, "cells": {}, "tunings": {}}
        part = results[name] = resume.begun(results.get(name, {}), settings, options.output, empty)
        take(part, trained.get(name, {}))
        chosen = [way for way in ways(name) if way.name in labels]
        with Progress(console=console) as progress:
            # Once more for what a tuner has chosen.
            while tasks := list(missing(part, task, chosen, options.rates, data)):
                resume.study(results, tasks, options.output, progress)
        part["summary"] = summary(part)
        results["machine"] = speed.machine()
        resume.write(options.output, results)
        console.print(table(task, part["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
