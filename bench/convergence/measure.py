"""Trains with every algorithm and compares losses and accuracies: `python -m bench.convergence [--output …/convergence.json]`.

    digits      1,437 digits of 8x8 pixels, a perceptron of 4,810 parameters, 4 x 16 examples per step, SGD or Adam
    ring        the same with 8 x 16 examples per step, for algorithms that exchange parameters with neighbours
    fashion     Fashion-MNIST, the network of the example, 4 x 16 examples per step, SGD
    characters  text that comes with Python, a transformer of 0.37 M parameters, 2 x 8 x 64 characters per step, AdamW
    text        the text of the example, a transformer of 0.98 M parameters, 4 x 4 x 64 characters per step, AdamW

Ranks are threads. Each run of a seed begins with the same parameters and uses the same examples in the same order, so that only
the exchange differs. Losses are those of the final parameters over the training set (of fashion its first 10,000 images), in
float32 without compression. Of text they are those over its validation text.

Bars on digits: with error feedback signs, the largest 0.1 %, rank 1 and DoubleSqueeze are within 8 % of the training loss of
all-reduce. Without it they are a fifth or more above. Bars on fashion: the test accuracy is within half a point of all-reduce,
with default options and for each row that is near on digits.

On the ring, losses are those of the mean of all ranks' parameters. Their bars are in `gossip.py`: means over seeds of ratios to
all-reduce with the same start and order of examples. In rows "by label" each rank sees only its part of the examples, which are
sorted by label. They are compared with all-reduce on the same parts. `noise` is the codec's alpha^2 = |C(z) - z|^2 / |z|^2.

The optimizers of digits and fashion have no momentum: with it, error feedback by signs fails at the learning rate of
fashion, as the last row there shows. `DGC` has its own momentum, and is compared with all-reduce and momentum in the
optimizer. The rows of digits with "Adam" are compared with all-reduce and Adam.

Characters have no bars: they show which algorithms work with AdamW, and which remedies help the others. `loss_difference`
is in nats per character. Warm-ups, and freezes of Adam's second moment, end after a fifth of the steps, when the learning
rate has risen, or after half of them.

Text is for algorithms with local steps: all ranks meet once in 30 steps. As in the papers, they begin with a model that exact
means have trained for a while, the same in all rows of a seed. The bars are in `local_steps.py`, as
means over seeds of ratios, and a row's baseline may be another row than all-reduce. `bench.convergence.pseudo_gradients` shows
how codecs change what they exchange.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm, Stats
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.comm import Communicator, run_ranks
from bench.convergence.dealing import deal, order_by_label, order_of
from bench.convergence.report import judge, summary, table, unread
from bench.convergence.row import BASELINE, Row
from bench.convergence.rows import ROWS
from bench.convergence.tasks import Data, Task, up
from bench.models.data import Inputs, outputs

DECAY = 0.01  # of AdamW
_WARM = 1000  # seeds of warm-ups begin here, so that their orders of examples are others
LOOKS = 20  # at losses and metrics of a run whose way counts
_NOISE = 40  # steps from one look at an algorithm's noise to the next
_PART = 1000  # examples that are evaluated at once
_SOME = 2000  # examples of the test set that are looked at on the way

Point = tuple[float, float]


@dataclass(frozen=True)
class Trained:
    """What one rank has at the end of a run.

    Attributes:
        model: with its final parameters; where ranks differ, with the mean of all.
        stats: of the algorithm, without what looks on the way have sent.
        told: further numbers of the algorithm, by name.
        points: losses and metrics that were looked at on the way.
    """

    model: torch.nn.Module
    stats: Stats
    told: dict[str, float]
    points: list[Point]


@dataclass(frozen=True)
class End:
    """How a rank's run ended early.

    Attributes:
        error: what it raised.
        finite: True if all its parameters were finite then.
    """

    error: Exception
    finite: bool


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
    if callable(kind):
        optimizer = kind(model, rate)
    elif kind == "sgd":
        kept = 0.0 if row.kind is algorithms.DGC else momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=(1 - momentum) * rate, momentum=kept)
    elif kind == "adagrad":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay[kind])
    return row.kind(model, optimizer, communicator=communicator, **options), optimizer


def train(
    communicator: Communicator,
    task: Task,
    row: Row,
    start: torch.nn.Module,
    data: Data,
    order: torch.Tensor,
    ends: list[End],
    looks: int = 1,
) -> Trained:
    """One rank's part of a run.

    Args:
        communicator: the ranks.
        task: what to train.
        row: how.
        start: the model at the beginning; left alone.
        data: all of it.
        order: which examples each rank sees at each step, shape (steps, ranks, batch).
        ends: takes this rank's end if it raises.
        looks: at losses and metrics, at the same distance; the last one is the end, and left to the caller.
    """
    model = copy.deepcopy(start)
    if row.dense:
        make_dense(model)
    steps = len(order)
    algorithm, optimizer = wrap(communicator, task, row, model, steps)
    points: list[Point] = []
    places, looked = {round(steps * look / looks) for look in range(1, looks)}, 0

    def look(taken: int) -> None:
        nonlocal looked
        if taken in places:
            # What is under way belongs to steps.
            algorithm.wait()
            before = algorithm.stats().bytes_sent
            points.append(_point(task, algorithm, model, communicator, data))
            looked += algorithm.stats().bytes_sent - before

    try:
        noise = take_steps(algorithm, optimizer, task, data, order[:, communicator.rank], after=look)
    except Exception as error:
        ends.append(End(error, all(bool(p.isfinite().all()) for p in model.parameters())))
        raise
    told = {"noise": statistics.fmean(noise)} if noise else {}
    if isinstance(algorithm, algorithms.Choco) and algorithm.eta is not None:
        told["eta"] = algorithm.eta
    on_parameters = isinstance(algorithm, algorithms.ModelAlgorithm)
    if on_parameters:
        algorithm.wait()
    # Before what follows, whose bytes are not those of steps.
    stats = algorithm.stats()
    stats = dataclasses.replace(stats, bytes_sent=stats.bytes_sent - looked)
    if on_parameters:
        told["consensus"] = algorithm.consensus()
        algorithm.synchronize()
    algorithm.close()
    return Trained(model, stats, told, points)


def _point(task: Task, algorithm: Algorithm, model: torch.nn.Module, communicator: Communicator, data: Data) -> Point:
    """Loss and metric of the mean of all ranks; on one rank, while the others wait: they share the processors."""
    with algorithm.averaged():
        found = evaluate(task, model, data.test_x, data.test_y, _SOME) if communicator.rank == 0 else (0.0, 0.0)
        model.train()
    first: Point = communicator.broadcast_object(found)
    return first


def make_dense(model: torch.nn.Module) -> None:
    """Gives all tables of a model dense gradients."""
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
            part.sparse = False


def take_steps(
    algorithm: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    data: Data,
    mine: torch.Tensor,
    last: int | None = None,
    after: Callable[[int], None] = lambda steps: None,
) -> list[float]:
    """Trains on a rank's examples of each step, up to `last`; returns the codec's noise, looked at now and then.

    `after` is called with the number of steps that have been taken.
    """
    rates, noise = [group["lr"] for group in optimizer.param_groups], []
    for step, batch in enumerate(mine[:last]):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step / len(mine))
        optimizer.zero_grad()
        task.loss(outputs(algorithm, data.x[batch]), data.y[batch]).backward()
        optimizer.step()
        if isinstance(algorithm, Differences) and step % _NOISE == 0:
            noise.append(algorithm.noise())
        after(step + 1)
    return noise


@torch.no_grad()
def evaluate(
    task: Task, model: torch.nn.Module, x: Inputs, y: torch.Tensor, most: int | None = None
) -> tuple[float, float]:
    """Mean loss, and metric, of the first `most` examples; of all if None."""
    model.eval()
    y = y[:most]
    found = [outputs(model, x[first : min(first + _PART, len(y))]) for first in range(0, len(y), _PART)]
    return task.loss(torch.cat(found), y).item(), task.metric(torch.cat(found), y)


def begun(task: Task, data: Data, seed: int) -> torch.nn.Module:
    """The model with which all rows of a seed begin: a new one, or one that exact means have trained for a while."""
    torch.manual_seed(seed)
    start = task.model()
    if not task.warm:
        return start
    baseline = next(row for row in ROWS if row.label == BASELINE and task.name in row.tasks)
    order = order_of(len(data.x), task, task.warm, _WARM + seed)
    rising = dataclasses.replace(task, schedule=up)
    return run_ranks(task.ranks, train, rising, baseline, start, data, order, [], timeout=120.0)[0].model


def run(
    task: Task,
    row: Row,
    data: Data,
    steps: int,
    seed: int,
    start: torch.nn.Module | None = None,
    *,
    looks: int = 1,
) -> dict[str, Any]:
    """Trains once.

    Args:
        task: what to train.
        row: how.
        data: all of it.
        steps: to take.
        seed: of the order of examples, and of the model.
        start: the model, if it is at hand: that of `begun`.
        looks: at losses and metrics of the test set, at the same distance; the last one is the end.

    Returns:
        `loss`, the metric by its name, `bytes_per_step` that a rank sends, and `seconds`; with more looks than one `points`, what
        each has found. Only the last one is at the whole test set.

    Raises:
        RuntimeError: the ranks do not end with the same bits.
    """
    start = begun(task, data, seed) if start is None else start
    order = order_by_label(data.y, task, steps, seed) if row.by_label else deal(data, task, steps, seed)
    ends: list[End] = []
    began = time.perf_counter()
    try:
        trained = run_ranks(task.ranks, train, task, row, start, data, order, ends, looks, timeout=120.0)
    except Exception:
        # The other ranks raise that they have lost that one.
        expected = [end.error for end in ends if row.raises is not None and isinstance(end.error, row.raises)]
        if not expected:
            raise
        told = {"error": f"{type(expected[0]).__name__}: {expected[0]}", "finite": all(end.finite for end in ends)}
        lost = dict.fromkeys(("loss", task.metric_name, "bytes_per_step"), math.nan)
        return {"seed": seed, **lost, "seconds": time.perf_counter() - began, **told}
    seconds = time.perf_counter() - began
    first, *others = ([p.detach().view(torch.int32) for p in one.model.parameters()] for one in trained)
    if not all(torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True)):
        raise RuntimeError(f"{row.label} on {task.name}: the ranks ended with different parameters")
    loss, metric = evaluate(task, trained[0].model, data.test_x, data.test_y)
    points = {"points": [*trained[0].points, (loss, metric)]} if looks > 1 else {}
    if not task.validates:
        loss, _ = evaluate(task, trained[0].model, data.x, data.y, task.looked_at)
    sent = max(one.stats.bytes_sent for one in trained) / steps
    told = {name: statistics.fmean(one.told[name] for one in trained) for name in trained[0].told}
    found = {"loss": loss, task.metric_name: metric, "bytes_per_step": sent, "seconds": seconds}
    return {"seed": seed, **found, **told, **points}


def wanted(task: Task, only: list[str] | None, rows: Sequence[Row] = ROWS) -> list[Row]:
    """The rows of a task with these labels, or whose labels contain one of the names, and what they are compared with."""
    rows = [row for row in rows if task.name in row.tasks]
    if only is None:
        return rows
    labels = {row.label for row in rows}
    names = [name for given in only if given not in labels for name in given.split(",")]
    chosen = [row for row in rows if row.label in only or any(name in row.label for name in names)]
    needed = {BASELINE, *(row.baseline for row in chosen)}
    return [row for row in rows if row in chosen or row.label in needed]


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
    if task.warm:
        settings["warm"] = task.warm
    if data.digest:
        settings["data"] = data.digest
    labels = [row.label for row in ROWS]
    alike = all(old.get(name) == value for name, value in settings.items())
    results = [unread(one) for one in old.get("rows", []) if alike and one["label"] in labels]
    known = {one["label"] for one in results} if new else set()
    starts = [begun(task, data, seed) for seed in range(seeds)]
    for row in [row for row in rows if row.label not in known]:
        runs = [run(task, row, data, steps, seed, start) for seed, start in enumerate(starts)]
        last = summary(row, steps, runs)
        others = [one for one in results if one["label"] != row.label]
        results = sorted([*others, last], key=lambda one: labels.index(one["label"]))
        seconds = statistics.fmean(one["seconds"] for one in runs)
        console.print(f"{task.name}: {row.label}: {last['loss']:.4f}, {last['accuracy']:.2%}, {seconds:.0f} s a run")
        judge(task, [one for one in results if any(base["label"] == one["baseline"] for base in results)])
        yield settings | {"rows": results}
    if results:
        judge(task, results)
        console.print(table(task, results))
