"""Samples a second of ranks of different speed: as many steps for each, and steps in proportion to the speeds.

python -m bench.training.unequal [--seconds 0.02] [--rounds 12] [--output bench/results/unequal.json]

A rank is a thread that sleeps in each step, for as long as its speed asks for. Rounds in which the speeds are not known yet are
not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms import LocalSGD
from bagua_kernels.comm import Communicator, run_ranks

_INTERVAL = 20
_UNKNOWN = 3  # rounds until steps follow the speeds
# How many times as long a step takes on each rank; what is compared, and what it must reach.
_SETTINGS = (
    ("one of two twice as slow", (1.0, 2.0), "of the fast one alone", 1.0, 1.35),
    ("one of four three times as slow", (1.0, 1.0, 1.0, 3.0), "of the summed speed", 3 + 1 / 3, 0.88),
)


def samples_per_second(factors: tuple[float, ...], seconds: float, rounds: int, by_speed: bool) -> float:
    """Of all ranks together."""

    def rank(communicator: Communicator) -> tuple[int, float, float]:
        torch.manual_seed(0)
        module = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = LocalSGD(module, optimizer, interval=_INTERVAL, communicator=communicator, by_speed=by_speed)
        x = torch.randn(1, 64)
        steps, began, taken = 0, 0.0, model.rounds
        assert taken is not None
        while taken.begun < rounds + _UNKNOWN:
            if taken.begun == _UNKNOWN and not began:
                began = time.monotonic()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            time.sleep(seconds * factors[communicator.rank])
            optimizer.step()
            steps += taken.begun >= _UNKNOWN and began > 0
        model.wait()
        ended = time.monotonic()
        model.close()
        return steps, began, ended

    everyone = run_ranks(len(factors), rank, timeout=600)
    took = max(end for _, _, end in everyone) - min(begin for _, begin, _ in everyone)
    return sum(steps for steps, _, _ in everyone) / took


def measured(seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each setting."""
    rows = []
    for name, factors, of, ideal, bar in _SETTINGS:
        alone = _alone(seconds, rounds)
        equal, by_speed = (samples_per_second(factors, seconds, rounds, way) for way in (False, True))
        shares = {"equal": equal / (alone * ideal), "by_speed": by_speed / (alone * ideal)}
        rows.append({"name": name, "of": of, "alone": alone, **shares, "bar": bar})
    return rows


def _alone(seconds: float, rounds: int) -> float:
    """Steps a second of a rank without others."""
    module = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, steps = torch.randn(1, 64), rounds * _INTERVAL
    began = time.monotonic()
    for _ in range(steps):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        time.sleep(seconds)
        optimizer.step()
    return steps / (time.monotonic() - began)


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.unequal", description="Ranks of different speed.")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a step of a fast rank")
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    rows = measured(options.seconds, options.rounds)
    table = Table(
        "ranks", "samples a second", "as many steps", "by speed", "at least", title="ranks of different speed"
    )
    for row in rows:
        table.add_row(row["name"], row["of"], f"{row['equal']:.3f}", f"{row['by_speed']:.3f}", f"{row['bar']:g}")
    Console(width=120).print(table)
    if options.output:
        options.output.write_text(json.dumps({"seconds": options.seconds, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
