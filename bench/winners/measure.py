"""The fastest algorithm for each network and model, predicted and measured: `python -m bench.winners [--output …/winners.json]`.

Four emulated hosts take steps of three models on nine networks, as in `bench.training`. The facts of the machine are fitted to
two other networks: one without a limit, and one of 500 Mbit/s. From these the cost model of `bagua_kernels.advise` predicts the
seconds of all methods on those nine. It also predicts them at 10 Gbit/s, which this machine is too slow for.

A cell is a network, a model and a choice of methods: see `report.CHOICES`. It is right if what is predicted to be fastest takes
at most 5 % longer than what is. All is written as soon as it is measured: what is in the file is not measured again. Needs
Linux and root. `python -m bench.tables` writes the table of `docs/choosing.md` from the file.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from bench import resume, speed
from bench.netlab import lab as netlab
from bench.resume import Missing, Results
from bench.training.measure import run
from bench.winners import report

HOSTS = 4
MODELS = ("resnet", "bert", "small")
RATES, DELAYS = (10.0, 100.0, 1000.0), (0.0, 5.0, 20.0)  # Mbit/s, ms one way
FITTED: tuple[float | None, ...] = (None, 500.0)  # rates of the networks for the fit, without a delay
# Rivals that are measured in turns, by what they have in common. Local steps take whole rounds.
GRADIENTS = {"exact": ["ddp", "allreduce"], "small": ["alone", "bytegrad", "int4", "sign", "topk", "powersgd 4"]}
LOCAL = {"local": ["local_sgd", "diloco int4", "sparse_loco delayed"]}
PARTS = {"gradients": GRADIENTS, "local": LOCAL}
_ROUND = 32  # steps of a turn of local steps: two rounds of 16


def plan(rate: float | None, group: str) -> tuple[float | None, int, int]:
    """Rounds of turns at a rate, and steps of each turn."""
    if group == "local":
        return rate, 4, _ROUND
    if rate == min(RATES):
        # Exact means take up to 7 s there, beside which nothing else on the machine counts.
        return rate, 1, 2 if group == "exact" else 8
    return rate, 3, 4


def seconds(times: dict[str, list[float]]) -> dict[str, float]:
    """Seconds of a step: of local steps the mean, for one in many waits for an exchange."""
    return {
        name: statistics.fmean(each) if name in LOCAL["local"] else statistics.median(each)
        for name, each in times.items()
    }


def missing(results: Results) -> Iterator[Missing]:
    """What is to be measured yet: all rates of a model with one delay are one start of the hosts."""

    def measured(model: str, delay: float, part: str) -> None:
        rates = [*RATES, *(FITTED if not delay else ())]
        groups = [(names, [plan(rate, group) for rate in rates]) for group, names in PARTS[part].items()]
        tunings = results["tunings"].setdefault(f"{delay:g}", {})
        settings = {"model": model, "groups": groups, "tunings": tunings}
        told = run(HOSTS, "steps", settings, delay=delay or None)
        results["tunings"][f"{delay:g}"] = told["tunings"]
        for row in told["rows"]:
            place = {"model": model, "hosts": HOSTS, "rate_mbit": row["rate_mbit"], "delay_ms": delay}
            there = next((one for one in results["rows"] if place.items() <= one.items()), None)
            if there is None:
                results["rows"].append(there := {**place, "seconds": {}, "load_average": {}})
            there["seconds"] |= seconds(row["times"])
            there["load_average"][part] = told["load_average"]

    there = {(row["model"], row["delay_ms"], part) for row in results["rows"] for part in row["load_average"]}
    for model, delay, part in itertools.product(MODELS, DELAYS, PARTS):
        if (model, delay, part) not in there:
            yield f"{model}, {delay:g} ms, {part}", partial(measured, model, delay, part)


def main() -> int:
    """Reads the command line, measures what is missing, and prints the map."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.winners", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file, from which a study goes on")
    options = parser.parse_args()
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"hosts": HOSTS, "models": list(MODELS), "rates": list(RATES), "delays": list(DELAYS)}
    empty: Results = {"rows": [], "tunings": {}}
    results = resume.begun(resume.read(options.output), settings, options.output, empty)
    console = speed.console()
    with Progress(console=console) as progress:
        resume.study(results, list(missing(results)), options.output, progress)
    found = report.cells(results["rows"])
    results |= {"machine": speed.machine(), "cells": found, "summary": report.summary(found)}
    resume.write(options.output, results)
    report.show(console, found)
    return 0
