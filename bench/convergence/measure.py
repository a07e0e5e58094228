"""Trains with every algorithm and compares losses and accuracies: `python -m bench.convergence [--output …/convergence.json]`.

    digits      1,437 digits of 8x8 pixels, a perceptron of 4,810 parameters, 4 x 16 examples per step, SGD or Adam
    fashion     Fashion-MNIST, the network of the example, 4 x 16 examples per step, SGD
    characters  text that comes with Python, a transformer of 0.37 M parameters, 2 x 8 x 64 characters per step, AdamW

Ranks are threads. Each run of a seed begins with the same parameters and uses the same examples in the same order, so that only
the exchange differs. Losses are those of the final parameters over the training set (of fashion its first 10,000 images), in
float32 without compression.

Bars on digits: with error feedback signs, the largest 0.1 %, rank 1 and DoubleSqueeze are within 8 % of the training loss of
all-reduce. Without it they are a fifth or more above. Bars on fashion: the test accuracy is within half a point of all-reduce,
with default options and for each row that is near on digits.

The optimizers of digits and fashion have no momentum: with it, error feedback by signs fails at the learning rate of
fashion, as the last row there shows. `DGC` has its own momentum, and is compared with all-reduce and momentum in the
optimizer. The rows of digits with "Adam" are compared with all-reduce and Adam.

Characters have no bars: they show which algorithms work with AdamW, and which remedies help the others. `loss_difference`
is in nats per character. Warm-ups, and freezes of Adam's second moment, end after a fifth of the steps, when the learning
rate has risen, or after half of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm, OptimizerFitWarning, Stats
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from bench import speed
from bench.convergence.rows import BASELINE, ROWS, Row
from bench.convergence.tasks import TASKS, Data, Task

NEAR, WORSE, POINTS = 1.08, 1.2, 0.005
DECAY = 0.01  # of AdamW


@dataclass(frozen=True)
class Trained:
    """What one rank has at the end of a run."""

    model: torch.nn.Module
    stats: Stats


def wrap(
    communicator: Communicator, task: Task, row: Row, model: torch.nn.Module, steps: int
) -> tuple[Algorithm, torch.optim.Optimizer]:
    """The algorithm and the optimizer of a row."""
    momentum = task.momentum if row.momentum is None else row.momentum
    rate = task.rate if row.rate is None else row.rate
    decay = {"adam": 0.0, "adamw": DECAY}
    kind, options = row.optimizer or task.optimizer, row.arguments(steps)
    if issubclass(row.kind, MomentumAllReduce):
        own = row.kind(model, communicator=communicator, lr=rate, weight_decay=decay[kind], **options)
        return own, own.optimizer
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        kept = 0.0 if row.kind is algorithms.DGC else momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=(1 - momentum) * rate, momentum=kept)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay[kind])
    return row.kind(model, optimizer, communicator=communicator, **options), optimizer


def train(
    communicator: Communicator, task: Task, row: Row, start: torch.nn.Module, data: Data, order: torch.Tensor
) -> Trained:
    """One rank's part of a run.

    Args:
        communicator: the ranks.
        task: what to train.
        row: how.
        start: the model at the beginning; left alone.
        data: all of it.
        order: which examples each rank sees at each step, shape (steps, ranks, batch).
    """
    model = copy.deepcopy(start)
    algorithm, optimizer = wrap(communicator, task, row, model, len(order))
    rate = optimizer.param_groups[0]["lr"]
    mine = order[:, communicator.rank]
    for step, batch in enumerate(mine):
        for group in optimizer.param_groups:
            group["lr"] = rate * task.schedule(step / len(mine))
        optimizer.zero_grad()
        F.cross_entropy(algorithm(data.x[batch]), data.y[batch]).backward()
        optimizer.step()
    stats = algorithm.stats()
    algorithm.close()
    return Trained(model, stats)


def order_of(examples: int, task: Task, steps: int, seed: int) -> torch.Tensor:
    """Draws the examples of all steps and ranks, shape (steps, ranks, batch): each once before any comes again."""
    # Of its own: PyTorch's global generator is shared by all threads, in whatever order they come.
    generator = torch.Generator().manual_seed(seed)
    each = task.ranks * task.batch
    passes = -(-steps // (examples // each))
    orders = [torch.randperm(examples, generator=generator)[: examples // each * each] for _ in range(passes)]
    return torch.cat(orders)[: steps * each].view(steps, task.ranks, task.batch)


@torch.no_grad()
def evaluate(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Mean loss, and share of right answers."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(1000)])
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).float().mean().item()


def run(task: Task, row: Row, data: Data, steps: int, seed: int) -> dict[str, Any]:
    """Trains once.

    Raises:
        RuntimeError: the ranks do not end with the same bits.
    """
    torch.manual_seed(seed)
    start = task.model()
    order = order_of(len(data.x), task, steps, seed)
    began = time.perf_counter()
    trained = run_ranks(task.ranks, train, task, row, start, data, order, timeout=120.0)
    seconds = time.perf_counter() - began
    first, *others = ([p.detach().view(torch.int32) for p in one.model.parameters()] for one in trained)
    if not all(torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True)):
        raise RuntimeError(f"{row.label} on {task.name}: the ranks ended with different parameters")
    loss, _ = evaluate(trained[0].model, data.x[: task.looked_at], data.y[: task.looked_at])
    _, accuracy = evaluate(trained[0].model, data.test_x, data.test_y)
    sent = max(one.stats.bytes_sent for one in trained) / steps
    return {"seed": seed, "loss": loss, "accuracy": accuracy, "bytes_per_step": sent, "seconds": seconds}


def summary(task: Task, row: Row, steps: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The means of a row's runs, and what it takes to repeat them."""
    options = {"momentum": row.momentum, "rate": row.rate, "optimizer": row.optimizer}
    return {
        "label": row.label,
        "algorithm": row.kind.name,
        "options": row.arguments(steps),
        **{key: value for key, value in options.items() if value is not None},
        "baseline": row.baseline,
        "steps": steps,
        "loss": statistics.fmean(one["loss"] for one in runs),
        "accuracy": statistics.fmean(one["accuracy"] for one in runs),
        "bytes_per_step": runs[0]["bytes_per_step"],
        "runs": runs,
    }


def judge(task: Task, rows: list[dict[str, Any]]) -> None:
    """Adds to each row how it compares with its baseline, and whether its bar is met; None where there is no bar."""
    found = {one["label"]: one for one in rows}
    bars = {row.label: row for row in ROWS}
    for one in rows:
        base, row = found[one["baseline"]], bars[one["label"]]
        one["loss_ratio"] = one["loss"] / base["loss"]
        one["loss_ratios"] = [r["loss"] / b["loss"] for r, b in zip(one["runs"], base["runs"], strict=True)]
        one["loss_difference"] = one["loss"] - base["loss"]
        one["accuracy_difference"] = one["accuracy"] - base["accuracy"]
        one["bar"], one["met"] = "", None
        if one is base:
            continue
        if task.name == "digits" and row.bar == "near":
            one["bar"], one["met"] = f"loss ≤ {NEAR} x", one["loss_ratio"] <= NEAR
        elif task.name == "digits" and row.bar == "worse":
            # What has diverged to NaN is worse, too.
            one["bar"], one["met"] = f"loss ≥ {WORSE} x", not one["loss_ratio"] < WORSE
        elif task.name == "fashion" and row.bar != "none" and (row.bar or not row.options):
            one["bar"], one["met"] = f"accuracy ≥ -{POINTS:.1%}", one["accuracy_difference"] >= -POINTS


def table(task: Task, rows: Sequence[dict[str, Any]]) -> Table:
    seeds = len(rows[0]["runs"])
    grid = Table(
        title=f"{task.name}: {task.ranks} ranks, {rows[0]['steps']} steps, means of {seeds} seeds", title_justify="left"
    )
    grid.add_column("")
    for heading in ("training loss", "of all-reduce's", "by seed", "test accuracy", "difference", "bytes a step", "s"):
        grid.add_column(heading, justify="right")
    grid.add_column("bar")
    for one in rows:
        verdict = "" if one["met"] is None else "met" if one["met"] else "[bold]MISSED[/bold]"
        grid.add_row(
            one["label"],
            f"{one['loss']:.4f}",
            f"{one['loss_ratio']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in one["loss_ratios"]),
            f"{one['accuracy']:.2%}",
            f"{one['accuracy_difference'] * 100:+.2f}",
            f"{one['bytes_per_step']:,.0f}",
            f"{statistics.fmean(r['seconds'] for r in one['runs']):.0f}",
            f"{one['bar']} {verdict}",
        )
    return grid


def wanted(task: Task, only: list[str] | None) -> list[Row]:
    """The rows with these labels, or whose labels contain one of the names, and what they are compared with."""
    rows = [row for row in ROWS if task.name in row.tasks]
    if only is None:
        return rows
    labels = {row.label for row in rows}
    names = [name for given in only if given not in labels for name in given.split(",")]
    chosen = [row for row in rows if row.label in only or any(name in row.label for name in names)]
    needed = {BASELINE, *(row.baseline for row in chosen)}
    return [row for row in rows if row in chosen or row.label in needed]


def finite(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unread(row: dict[str, Any]) -> dict[str, Any]:
    """A row that was written before, with NaN for losses that were not finite."""
    runs = [{**one, "loss": math.nan if one["loss"] is None else one["loss"]} for one in row["runs"]]
    return {**row, "runs": runs, "loss": math.nan if row["loss"] is None else row["loss"]}


def compare(
    task: Task, rows: list[Row], steps: int, seeds: int, console: Console, old: dict[str, Any], new: bool
) -> Iterator[dict[str, Any]]:
    """Trains with rows of a task; yields what is known after each, with those rows of `old` that were trained alike.

    With `new` only those that `old` lacks.
    """
    data = task.data()
    settings: dict[str, Any] = {"batch": task.batch, "rate": task.rate, "momentum": task.momentum, "ranks": task.ranks}
    settings |= {"steps": steps, "seeds": list(range(seeds))}
    if task.optimizer != "sgd":
        settings["optimizer"] = task.optimizer
    if data.digest:
        settings["data"] = data.digest
    labels = [row.label for row in ROWS]
    alike = all(old.get(name) == value for name, value in settings.items())
    results = [unread(one) for one in old.get("rows", []) if alike and one["label"] in labels]
    known = {one["label"] for one in results} if new else set()
    for row in [row for row in rows if row.label not in known]:
        runs = [run(task, row, data, steps, seed) for seed in range(seeds)]
        last = summary(task, row, steps, runs)
        others = [one for one in results if one["label"] != row.label]
        results = sorted([*others, last], key=lambda one: labels.index(one["label"]))
        seconds = statistics.fmean(one["seconds"] for one in runs)
        console.print(f"{task.name}: {row.label}: {last['loss']:.4f}, {last['accuracy']:.2%}, {seconds:.0f} s a run")
        judge(task, [one for one in results if any(base["label"] == one["baseline"] for base in results)])
        yield settings | {"rows": results}
    if results:
        judge(task, results)
        console.print(table(task, results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, help="one of them; all by default")
    parser.add_argument(
        "--only",
        "--algorithms",
        nargs="+",
        metavar="NAMES",
        help="whole labels of rows, or parts of labels, separated by commas; all by default",
    )
    parser.add_argument("--new", action="store_true", help="only rows that --output does not hold yet")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each row")
    parser.add_argument(
        "--output", type=Path, help="JSON file to write; tasks and rows that are not run keep what it holds"
    )
    options = parser.parse_args()
    if options.seeds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("steps and seeds must be 1 or more")
    # What does not go together is measured all the same.
    warnings.simplefilter("ignore", OptimizerFitWarning)
    # Four ranks fill a small machine without further threads.
    torch.set_num_threads(1)
    console = speed.console()
    report: dict[str, Any] = {}
    if options.output and options.output.exists():
        report = json.loads(options.output.read_text())
    for name in [options.task] if options.task else TASKS:
        task = TASKS[name]
        steps = options.steps or task.steps
        rows, old = wanted(task, options.only), report.get(name, {})
        for known in compare(task, rows, steps, options.seeds, console, old, options.new):
            report |= {name: finite(known), "machine": speed.machine()}
            if options.output:
                speed.write(options.output, report)
