"""Losses with a quorum of three of four ranks: `python -m bench.convergence.quorum [--output …/quorum.json]`.

Four ranks train a perceptron on digits by DiLoCo, on a virtual clock that makes runs repeatable. With all of them in step each
takes 600 steps. With the quorum one rank is three times slower, and the others take more steps, so that all together have seen
as many examples. The loss is that of the mean model on all training examples.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagua_kernels.algorithms import DiLoCo
from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bench import speed
from bench.convergence.tasks import digits, perceptron

RANKS, STEPS, INTERVAL, BATCH, RATE, SLOWER = 4, 600, 10, 16, 0.1, 3
OUTER: dict[str, Any] = {"interval": INTERVAL, "outer_lr": 0.7, "outer_momentum": 0.6}
MOST = 1.05
# Options beside the outer rule, and how many times slower the last rank is.
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "all four in step": ({"quorum": 4}, 1),
    "3 of 4, one slow": ({"quorum": 3, "grace": 0.5}, SLOWER),
}


def steps_of(slower: int) -> list[int]:
    """The steps of each rank: in all as many as with equal ranks, in whole rounds."""
    fast = STEPS * RANKS * slower // ((RANKS - 1) * slower + 1) // INTERVAL * INTERVAL
    return [fast] * (RANKS - 1) + [RANKS * STEPS - (RANKS - 1) * fast]


def loss(options: dict[str, Any], slower: int, seed: int) -> dict[str, float]:
    """Trains once; returns the loss, and the rounds that the slow rank has taken."""
    torch.manual_seed(seed)
    start, data, schedule = perceptron(), digits(), Schedule(seed)

    def rank(communicator: Communicator) -> torch.nn.Module:
        module, me = copy.deepcopy(start), communicator.rank
        own = torch.arange(len(data.y))[me :: communicator.size]
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        model = DiLoCo(module, optimizer, communicator=communicator, **OUTER, **options)
        for step in range(steps_of(slower)[me]):
            generator = torch.Generator().manual_seed((seed * 10 * STEPS + step) * RANKS + me)
            chosen = own[torch.randint(len(own), (BATCH,), generator=generator)]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()
            optimizer.step()
            schedule.sleep(1.0 if me < RANKS - 1 else float(slower))
        model.synchronize()
        model.close()
        return module

    mean, *_ = run_ranks(RANKS, rank, timeout=100.0 * STEPS, schedule=schedule)
    with torch.no_grad():
        return {"loss": float(torch.nn.functional.cross_entropy(mean(data.x), data.y)), "seconds": schedule.now()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table, rows = Table(title=f"steps of the ranks with a slow one: {steps_of(SLOWER)}"), []
    for column in ("ranks", "loss", "of all in step", "virtual seconds"):
        table.add_column(column, justify="left" if column == "ranks" else "right")
    for name, (options, slower) in ROWS.items():
        found = [loss(options, slower, seed) for seed in range(given.seeds)]
        row: dict[str, Any] = {"name": name, "options": options, "slower": slower, "losses": [f["loss"] for f in found]}
        row |= {"loss": statistics.fmean(row["losses"]), "seconds": statistics.fmean(f["seconds"] for f in found)}
        rows.append(row)
        row["ratio"] = row["loss"] / rows[0]["loss"]
        table.add_row(name, f"{row['loss']:.4f}", f"{row['ratio']:.3f}", f"{row['seconds']:.0f}")
    speed.console().print(table)
    if given.output:
        speed.write(given.output, {"steps": steps_of(SLOWER), "most": MOST, "rows": rows, "machine": speed.machine()})
    if rows[1]["ratio"] > MOST:
        raise SystemExit(f"a quorum has {rows[1]['ratio']:.3f} of the loss of all ranks in step, more than {MOST}")


if __name__ == "__main__":
    main()
