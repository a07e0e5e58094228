"""Which outer steps suit runs of few rounds: `python -m bench.short_runs [--output …/short_runs.json] [--plot …/short_runs.png]`.

A small transformer for characters trains with simulated ranks, which meet once in 15 steps. A cell is a number of rounds and of
ranks, weights that are new or that another text has trained, and AdamW or Muon. In each cell all outer steps begin with the
same parameters, and a rank draws the same text in all of them. What counts is the loss of the outer parameters over text that
is held back.

A pair is a learning rate and a momentum that stay the same. In each cell the default is compared with the best pair, and with
`LocalSGD`, whose pair is 1 and 0. SlowMo and SparseLoCo have their own pairs. Runs of 400 rounds have fewer pairs. A cell whose
default is not surely within the bars gets three seeds.

All is written as soon as it is measured: what is in the file is not measured again. `--workers 2` takes two cells at a time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from bench import resume
from bench.resume import Results
from bench.short_runs import report, simulate
from bench.short_runs.simulate import Cell
from bench.short_runs.ways import AUTO, WAYS, ways_of

ROUNDS, RANKS = (10, 40, 100, 400), (2, 4, 8)
# How much worse than the best fixed pair, and than plain means, the default may be, in nats.
BEST, MEANS = 0.010, 0.005
SURE = 0.005  # nats below a bar with which one seed is enough


def cells() -> list[Cell]:
    """All cells, those first that take least time."""
    found = [
        Cell(rounds, ranks, start, optimizer)
        for rounds, ranks, start, optimizer in itertools.product(
            ROUNDS, RANKS, ("scratch", "trained"), ("adamw", "muon")
        )
    ]
    return sorted(found, key=lambda cell: cell.rounds * cell.ranks)


def described(losses: Results) -> Results:
    """Losses by cell, seed and way, with what they show."""
    about = {"torch": torch.__version__, "bars": {"best": BEST, "means": MEANS}}
    return {**about, "losses": losses, "summary": report.summary(losses)}


def measured(task: tuple[Cell, int, list[str]]) -> tuple[str, str, dict[str, float]]:
    """Losses of some ways in a cell, with one seed; runs in a process of its own."""
    cell, seed, names = task
    torch.set_num_threads(1)
    ways = [WAYS[name] for name in names if name != "together"]
    found = simulate.run(cell, ways, seed) if ways else {}
    if "together" in names:
        found["together"] = simulate.together(cell, seed)
    return cell.name, str(seed), found


def missing(losses: Results, chosen: Iterable[Cell], seeds: int) -> list[tuple[Cell, int, list[str]]]:
    """What is to be measured yet."""
    tasks = []
    for cell in chosen:
        for seed in range(seeds):
            there = losses.get(cell.name, {}).get(str(seed), {})
            if names := [name for name in [*ways_of(cell.rounds), "together"] if name not in there]:
                tasks.append((cell, seed, names))
    return tasks


def near(losses: Results, chosen: Iterable[Cell]) -> list[Cell]:
    """The cells with a default, of DiLoCo or SlowMo, that is not surely within the bars after one seed: they get more of them."""
    rows = {
        row["cell"]: [row[family] for family in AUTO if family in row and family != "sparse"]
        for row in report.summary(losses)
    }
    return [
        cell
        for cell in chosen
        if any(own["above_best"] > BEST - SURE or own["above_means"] > MEANS - SURE for own in rows.get(cell.name, []))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.short_runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file, from which a study goes on")
    parser.add_argument("--plot", type=Path, help="picture of the differences")
    parser.add_argument("--rounds", type=int, nargs="+", default=list(ROUNDS), help="of the cells that are measured")
    parser.add_argument("--workers", type=int, default=1, help="cells at a time, each with one thread")
    options = parser.parse_args()
    chosen, losses = (
        [cell for cell in cells() if cell.rounds in options.rounds],
        resume.read(options.output).get("losses", {}),
    )
    console = Console(width=150)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for seeds in (1, 3):
            tasks = missing(losses, chosen if seeds == 1 else near(losses, chosen), seeds)
            for name, seed, found in pool.imap_unordered(measured, tasks):
                losses.setdefault(name, {}).setdefault(seed, {}).update(found)
                resume.write(options.output, described(losses))
                console.print(f"{name}, seed {seed}", highlight=False)
    report.show(console, losses)
    if options.plot:
        report.plot(losses, options.plot)
    return 0
