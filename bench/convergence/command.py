"""The command `python -m bench.convergence`: tasks by `measure`, models by `paired`."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from bagua_kernels.algorithms import OptimizerFitWarning
from bench import resume, speed
from bench.convergence import measure, paired
from bench.convergence.models import MODELS
from bench.convergence.report import finite
from bench.convergence.tasks import TASKS


def main() -> None:
    """Reads the command line, trains and writes results."""
    description = f"{measure.__doc__}\n{paired.__doc__}"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*TASKS, *MODELS],
        metavar="TASK",
        help=f"of {', '.join(TASKS)}, all by default; or of the models {', '.join(MODELS)}, in a file of their own",
    )
    parser.add_argument(
        "--only",
        "--algorithms",
        nargs="+",
        metavar="NAMES",
        help="whole labels of rows, or parts of labels, separated by commas; all by default",
    )
    parser.add_argument("--new", action="store_true", help="only rows that --output does not hold yet, as with models")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--seeds", type=int, help="runs of each row (default: 2, of text and of models 3)")
    parser.add_argument(
        "--output", type=Path, help="JSON file to write; tasks and rows that are not run keep what it holds"
    )
    options = parser.parse_args()
    if any(count is not None and count < 1 for count in (options.seeds, options.steps)):
        parser.error("steps and seeds must be 1 or more")
    tasks = options.tasks or list(TASKS)
    if {*tasks} & {*MODELS} and {*tasks} & {*TASKS}:
        parser.error("models have results of another form: run them by themselves, with an --output of their own")
    # What does not go together is measured all the same.
    warnings.simplefilter("ignore", OptimizerFitWarning)
    # Of PyTorch, about tensors that it makes itself.
    warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
    # The ranks fill a small machine without further threads.
    torch.set_num_threads(1)
    (_models if {*tasks} & {*MODELS} else _tasks)(options, tasks)


def _tasks(options: argparse.Namespace, names: list[str]) -> None:
    console = speed.console()
    report: dict[str, Any] = {}
    if options.output and options.output.exists():
        report = json.loads(options.output.read_text())
    for name in names:
        task = TASKS[name]
        steps = options.steps or task.steps
        rows, old = measure.wanted(task, options.only), report.get(name, {})
        for known in measure.compare(task, rows, steps, options.seeds or task.seeds, console, old, options.new):
            report |= {name: finite(known), "machine": speed.machine()}
            if options.output:
                speed.write(options.output, report)


def _models(options: argparse.Namespace, names: list[str]) -> None:
    console, results = speed.console(), resume.read(options.output)
    for name in names:
        task = MODELS[name]
        rows, data, seeds = measure.wanted(task, options.only, paired.ROWS), task.data(), options.seeds or task.seeds
        settings = paired.settings_of(task, data, options.steps or task.steps)
        part = resume.begun(results.get(name, {}), settings, options.output, {"runs": {}})
        results[name] = part
        with Progress(console=console) as progress:
            missing = list(paired.missing(part, task, rows, data, seeds))
            resume.study(results, missing, options.output, progress)
        console.print(paired.table(task, paired.summary(part, task)))
