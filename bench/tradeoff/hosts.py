"""Seconds of a step of each way on emulated hosts. Each of them runs this file, as a part of `bench.training.rank`."""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bagua_kernels import algorithms, comm
from bagua_kernels.algorithms.choosing.cost.methods import known
from bench.convergence.measure import make_dense, wrap
from bench.convergence.models import MODELS
from bench.convergence.tasks import Task
from bench.models.data import outputs
from bench.network.rank import together
from bench.tradeoff import models
from bench.tradeoff.ways import CLASSES, PIXELS, TASK, Way, ways
from bench.training import rank
from bench.training.rivals import HOOK, Rival, ddp, hooked
from bench.training.turns import host, measure, tuned

Batch = tuple[Any, torch.Tensor]

_STEPS = 10  # of a run, of which the first two may be those of exact means
_WARM = 4  # steps before those that are measured, after a round in which kernels are compiled and loaded
_SETTLES = 80  # steps in which a tuner measures, tries and chooses
_WINDOW = 2.0  # seconds, at least, in which asynchronous ranks take as many steps as they can
_WINDOWS = 3
_ROUNDS = 2  # of local steps


class Trainee(Rival):
    """A copy of a task's model, and one way to train it."""

    def __init__(self, way: Way, task: Task, batches: Sequence[Batch]) -> None:
        """Builds it; collective.

        Args:
            way: to train.
            task: with the model, the loss and the learning rate.
            batches: of this rank, which its steps use in turn.
        """
        torch.manual_seed(0)
        module = task.model()
        if way.row.dense:
            make_dense(module)
        self.name, self.way, self.keep = way.name, way, False
        self.task, self.batches = task, batches
        self.algorithm: algorithms.Algorithm | None = None
        self.hook: algorithms.ddp.Hook | None = None
        self.module: torch.nn.Module
        self.nap, self.steps = False, 0
        if way.ddp:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=task.rate)
            if way.ddp.startswith(HOOK):
                self.module, self.hook = hooked(module, way.ddp)
            else:
                self.module = ddp(module, way.ddp.removeprefix("ddp").strip())
        else:
            self.algorithm, self.optimizer = wrap(comm.world(), task, way.row, module, _STEPS)
            self.module = self.algorithm

    def loss(self) -> torch.Tensor:
        """See `Rival.loss`."""
        self.optimizer.zero_grad(set_to_none=not self.keep)
        x, y = self.batches[self.steps % len(self.batches)]
        return self.task.loss(outputs(self.module, x), y)

    def step(self) -> None:
        """Takes a step; a straggler sleeps for as long again."""
        began = time.monotonic()
        super().step()
        self.steps += 1
        if self.nap:
            time.sleep(time.monotonic() - began)

    @property
    def at_own_pace(self) -> bool:
        """True if ranks take steps without waiting for each other."""
        return self.way.kind == "asynchronous" and self.way.interval == 1

    def run(self, on: bool) -> None:
        """Has averages beside training go on, or stop; collective."""
        if isinstance(self.algorithm, algorithms.AsyncModelAverage):
            if on:
                self.algorithm.resume()
                return
            self.algorithm.pause()
            comm.world().barrier().wait()
            while not self.algorithm.average.idle:  # type: ignore[attr-defined]
                time.sleep(0.01)
            comm.world().barrier().wait()


def settled(way: Way, task: Task, batches: Sequence[Batch]) -> tuple[Trainee, str]:
    """A tuner that has chosen for the network as it is, and the spec of what it has chosen."""
    trainee = Trainee(way, task, batches)
    spec = ""
    for _ in range(_SETTLES):
        trainee.step()
        tuner = trainee.algorithm
        if isinstance(tuner, algorithms.AutoTune):
            better = tuner.chooser.better
            method = known()[better] if better else tuner.chooser.candidates[tuner.search.current].method
            spec = method.spec
            trainee.module = trainee.algorithm = tuner.settled()
    if isinstance(trainee.algorithm, algorithms.AsyncModelAverage):
        trainee.way = replace(way, kind="asynchronous")
    elif isinstance(trainee.algorithm, algorithms.RoundAlgorithm):
        trainee.way = replace(way, kind="local", interval=trainee.algorithm.interval)
    # Rounds of what follows begin anew, and the first one loads kernels.
    for _ in range(2 * trainee.way.interval):
        trainee.step()
    return trainee, spec


def windows(c: comm.Communicator, trainee: Trainee, counted: int) -> list[float]:
    """Seconds of a step at own paces: of each window all ranks' time, over all ranks' steps."""
    found = []
    trainee.run(True)
    for _ in range(_WINDOWS):
        together(c)
        trainee.step()
        began, steps = time.monotonic(), 0
        while steps < counted or time.monotonic() - began < _WINDOW:
            trainee.step()
            steps += 1
        pace = steps / (time.monotonic() - began)
        found.append(c.size / sum(c.all_gather_object(pace)))
    trainee.run(False)
    return found


def rounds(c: comm.Communicator, trainee: Trainee) -> list[float]:
    """Seconds of a step, as a mean over each interval."""
    found = []
    for _ in range(_ROUNDS):
        together(c)
        trainee.step()
        moments = [time.monotonic()]
        for _ in range(trainee.way.interval):
            trainee.step()
        moments.append(time.monotonic())
        everyone = c.all_gather_object(moments)
        found.append((max(end for _, end in everyone) - max(begin for begin, _ in everyone)) / trainee.way.interval)
    return found


def images(batch: int) -> Batch:
    """Random images and classes of this rank."""
    generator = torch.Generator().manual_seed(1 + comm.rank())
    x = torch.randn(batch, 1, 28, PIXELS // 28, generator=generator)
    return x, torch.randint(CLASSES, (batch,), generator=generator)


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host: all ways, for each cell of one delay."""
    wanted = [way for way in ways() if way.name in settings["ways"]]
    rows, order, tunings = [], random.Random(7), dict(settings["tunings"])
    for batch in sorted({cell["batch"] for cell in settings["cells"]}):
        cells = [cell for cell in settings["cells"] if cell["batch"] == batch]
        rows += measured(c, links, (wanted, TASK, [images(batch)]), cells, settings["budget"], tunings, order)
    return {"rows": rows, "tunings": tunings}


def on_model(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host: rows of a model, with batches of its data from a file."""
    warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
    wanted = [way for way in models.ways(settings["model"]) if way.name in settings["ways"]]
    batches: list[Batch] = torch.load(settings["batches"])[c.rank]
    tunings = dict(settings["tunings"])
    given = wanted, MODELS[settings["model"]], batches
    rows = measured(c, links, given, settings["cells"], settings["budget"], tunings, random.Random(7))
    return {"rows": rows, "tunings": tunings}


def measured(
    c: comm.Communicator,
    links: Any,
    given: tuple[list[Way], Task, Sequence[Batch]],
    cells: list[dict[str, Any]],
    budget: float,
    tunings: dict[str, str],
    order: random.Random,
) -> list[dict[str, Any]]:
    """Makes all trainees, and times their steps for each cell.

    Args:
        c: all hosts.
        links: whose rate is set.
        given: what a `Trainee` is made of, for each way.
        cells: networks and stragglers.
        budget: seconds for the tuning of a network.
        tunings: of networks, by rate; new ones are added.
        order: of turns.
    """
    wanted, task, batches = given
    tuners = [way for way in wanted if way.kind == "chosen"]
    # Unlimited, for parameters are broadcast when a wrapper is made.
    links.set(None)
    trainees = {way.name: Trainee(way, task, batches) for way in wanted if way not in tuners}
    for trainee in trainees.values():
        trainee.run(True)
        # A round begins after so many steps, and its result may come as many steps later.
        for _ in range(_WARM + (2 * trainee.way.interval if trainee.way.interval > 1 else 0)):
            trainee.step()
        trainee.run(False)
    rows = []
    for cell in cells:
        links.set(cell["rate"])
        tuning = tuned(c, budget, tunings.get(str(cell["rate"])))
        if tuning is not None:
            tunings[str(cell["rate"])] = replace(tuning, measured={}).to_json()
        for trainee in trainees.values():
            trainee.follow(tuning)
            trainee.nap = bool(cell["straggler"]) and c.rank == c.size - 1
        found = {}
        for way in tuners:
            trainees[way.name], found["chosen"] = settled(way, task, batches)
        rows.append({**cell, **timed(c, trainees, cell["rate"], order), **found})
        for way in tuners:
            trainees.pop(way.name).close()
    for trainee in trainees.values():
        trainee.close()
    trainees.clear()
    gc.collect()
    return rows


def timed(
    c: comm.Communicator, trainees: dict[str, Trainee], rate: float, order: random.Random
) -> dict[str, dict[str, Any]]:
    """Seconds of steps, and what a step costs a rank, by way."""
    turns, counted = (1, 3) if rate <= 100 else (3, 4)
    stepping = {name: one for name, one in trainees.items() if one.way.interval == 1 and not one.at_own_pace}
    taken, costs = measure(c, dict(stepping), turns, counted, order)
    for name in order.sample(sorted(set(trainees) - set(stepping)), len(trainees) - len(stepping)):
        one = trainees[name]
        before, first = host(), one.steps
        taken[name] = windows(c, one, counted) if one.at_own_pace else rounds(c, one)
        mine = {what: (value - before[what]) / (one.steps - first) for what, value in host().items()}
        one.conclude()
        c.barrier().wait()
        everyone = c.all_gather_object(mine)
        costs[name] = {what: sum(each[what] for each in everyone) / c.size for what in mine}
    return {"seconds": taken, "costs": {name: {k: each[k] for k in ("cpu", "bytes")} for name, each in costs.items()}}


if __name__ == "__main__":
    rank.main({"tradeoff": on_rank, "model": on_model})
