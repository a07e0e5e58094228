"""Losses of wait-avoiding group averaging: `python -m bench.convergence.wait_avoiding [--output …/wait_avoiding.json]`.

Eight ranks train a perceptron on digits for 600 steps; in each step two ranks, drawn anew, take half as long again. Nothing waits
in real time: `simulate.record` makes up the order of events, and `simulate.replay` computes all models from it. Each example is a
function of seed, rank and step, so that all rows of a seed see the same ones. The loss is that of the mean model on all
training examples. A row's bar is a ratio of losses, of the mean over seeds, or in every seed.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms import simulate
from bagua_kernels.comm.mailbox.groups import Butterfly, Groups
from bench.convergence.tasks import Data, digits, perceptron

RANKS, GROUP, PERIOD, STEPS, BATCH, RATE = 8, 2, 10, 600, 16, 0.1
LATE, LATE_RANKS = 0.5, 2


@dataclass(frozen=True)
class Alone(Groups):
    """Each rank by itself: what is left is the average of each period."""

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""
        return [(rank,) for rank in range(self.size)]


@dataclass(frozen=True)
class Fixed(Groups):
    """The same pairs in each version."""

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""
        return [(rank, rank + 1) for rank in range(0, self.size, 2)]


@dataclass(frozen=True)
class Scheme:
    """How ranks average.

    Attributes:
        groups: who with whom.
        period: versions of which the last one averages all.
        stale_rule: the rule for late ranks.
        activate: who gets a letter from the first rank.
        waits: True if all ranks of a group wait for each other.
    """

    groups: Groups
    period: int | None = PERIOD
    stale_rule: Literal["conservative", "paper"] = "conservative"
    activate: Literal["group", "all"] = "group"
    waits: bool = False


SCHEMES = {
    "all-reduce": Scheme(Alone(RANKS), period=1),
    "synchronous groups": Scheme(Butterfly(RANKS, GROUP), waits=True),
    "conservative": Scheme(Butterfly(RANKS, GROUP)),
    "paper rule": Scheme(Butterfly(RANKS, GROUP), stale_rule="paper"),
    "paper rule, fixed groups": Scheme(Fixed(RANKS), stale_rule="paper"),
    "local SGD": Scheme(Alone(RANKS)),
    "conservative, fixed groups": Scheme(Fixed(RANKS)),
    "conservative, all told": Scheme(Butterfly(RANKS, GROUP), activate="all"),
    "paper rule, all told": Scheme(Butterfly(RANKS, GROUP), stale_rule="paper", activate="all"),
}
# On examples that are sorted by label: each is worse than the one before, in every seed and by at least that ratio on average.
ROW = {
    "synchronous groups": 1.0,
    "conservative": 1.03,
    "paper rule": 1.10,
    "paper rule, fixed groups": 1.10,
    "local SGD": 1.10,
}


@cache
def data() -> Data:
    """The digits."""
    return digits()


def shards(by_label: bool, seed: int) -> list[torch.Tensor]:
    """Which examples each rank has."""
    y = data().y
    order = (
        torch.argsort(y, stable=True)
        if by_label
        else torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    )
    return list(order.chunk(RANKS))


def seconds(seed: int) -> list[list[float]]:
    """How long each rank's steps take."""
    draws = random.Random(seed)
    late = [set(draws.sample(range(RANKS), LATE_RANKS)) for _ in range(STEPS)]
    return [[1.0 + LATE * (rank in late[step]) for step in range(STEPS)] for rank in range(RANKS)]


def loss(scheme: Scheme, by_label: bool, seed: int) -> dict[str, float]:
    """Trains with a scheme; returns the loss and the staleness of contributions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start, own = perceptron(), shards(by_label, seed)

    def make(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = copy.deepcopy(start)
        return module, torch.optim.SGD(module.parameters(), lr=RATE)

    def batch_loss(module: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((seed * STEPS + step) * RANKS + rank)
        chosen = own[rank][torch.randint(len(own[rank]), (BATCH,), generator=generator)]
        return torch.nn.functional.cross_entropy(module(data().x[chosen]), data().y[chosen])

    options = {"activate": scheme.activate, "synchronous": scheme.waits}
    records = simulate.record(scheme.groups, scheme.period, seconds(seed), **options)  # type: ignore[arg-type]
    modules = simulate.replay(records, make, batch_loss, stale_rule=scheme.stale_rule)
    mean = copy.deepcopy(start)
    with torch.no_grad():
        for target, *parts in zip(mean.parameters(), *(module.parameters() for module in modules), strict=True):
            target.copy_(torch.stack(parts).mean(0))
        found = float(torch.nn.functional.cross_entropy(mean(data().x), data().y))
    lines = [
        event.execution
        for events in records
        for event in events
        if event.execution and len(event.execution.members) == 2
    ]
    stale = [line.staleness for line in lines]
    fresh = sum(line.fresh for line in lines) / len(lines) if lines else 1.0
    return {"loss": found, "fresh": fresh, "staleness": statistics.fmean(stale) if stale else 0.0}


def _job(job: tuple[str, bool, int]) -> tuple[tuple[str, bool, int], dict[str, float]]:
    name, by_label, seed = job
    return job, loss(SCHEMES[name], by_label, seed)


def bars(losses: dict[str, list[float]], by_label: bool) -> list[dict[str, Any]]:
    """What must hold: a text, the figure, the limit, and whether it does."""

    def ratio(a: str, b: str) -> float:
        return statistics.fmean(losses[a]) / statistics.fmean(losses[b])

    if not by_label:
        figure = ratio("conservative", "all-reduce")
        return [{"what": "conservative / all-reduce", "figure": figure, "most": 1.02, "holds": figure <= 1.02}]
    found, before = [], "all-reduce"
    for name, least in ROW.items():
        figure = ratio(name, before)
        ordered = all(a < b for a, b in zip(losses[before], losses[name], strict=True))
        text = f"{name} / {before}"
        found.append(
            {
                "what": text,
                "figure": figure,
                "least": least,
                "in_every_seed": ordered,
                "holds": ordered and figure >= least,
            }
        )
        before = name
    figure = ratio("conservative", "conservative, fixed groups")
    found.append(
        {"what": "conservative / the same, fixed groups", "figure": figure, "most": 0.80, "holds": figure <= 0.80}
    )
    for name in ("conservative", "paper rule"):
        figure = ratio(f"{name}, all told", name)
        found.append({"what": f"{name}, all told / {name}", "figure": figure, "least": 1.0, "holds": figure > 1.0})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    jobs = [(name, by_label, seed) for by_label in (False, True) for name in SCHEMES for seed in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = dict(pool.imap_unordered(_job, jobs))
    console, rows, held = Console(), [], []
    for by_label in (False, True):
        table = Table(title="examples " + ("sorted by label" if by_label else "at random"))
        for column in ("scheme", "loss", "of all-reduce", "fresh", "staleness"):
            table.add_column(column, justify="left" if column == "scheme" else "right")
        losses = {name: [results[name, by_label, seed]["loss"] for seed in range(options.seeds)] for name in SCHEMES}
        for name, each in losses.items():
            found = [results[name, by_label, seed] for seed in range(options.seeds)]
            row = {"scheme": name, "by_label": by_label, "losses": each}
            row |= {key: statistics.fmean(one[key] for one in found) for key in ("fresh", "staleness")}
            rows.append(row)
            quotient = statistics.fmean(each) / statistics.fmean(losses["all-reduce"])
            figures = (statistics.fmean(each), quotient, row["fresh"], row["staleness"])
            table.add_row(name, *(f"{figure:.3f}" for figure in figures))
        console.print(table)
        for bar in bars(losses, by_label):
            held.append({"by_label": by_label, **bar})
            limit = f"at least {bar['least']}" if "least" in bar else f"at most {bar['most']}"
            console.print(f"{'holds' if bar['holds'] else 'FAILS'}: {bar['what']} {bar['figure']:.3f}, {limit}")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows, "bars": held}, indent=1) + "\n")
    if not all(bar["holds"] for bar in held):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
