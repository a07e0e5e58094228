"""Ranks whose steps take different times: `python -m bench.training.stragglers [--output …/stragglers.json]`.

Eight processes on this machine train a perceptron of about 5,000 parameters. A sleep of 100 ms stands for the arithmetic of a
step. Two ranks of each step, drawn from one table for all rows, take 150 ms. By the time model of WAGMA-SGD, section V,
all-reduce takes the sum over steps of the slowest time. Wait-avoiding averages take the sum over periods of the slowest sum. In
the other rows one rank takes 300 ms in each step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels import comm
from bagua_kernels.algorithms import AsyncModelAverage, GradientAllReduce, Wagma
from bagua_kernels.comm.testing import run_processes

RANKS, STEPS, PERIOD, INTERVAL_MS = 8, 200, 10, 100.0
BASE, LATE, SLOW = 0.1, 0.05, 3.0
INPUTS, HIDDEN, OUTPUTS = 64, 64, 10
BATCH = 16
# What a wait may take beyond the exchanges that it waits for: eight processes share two cores.
SLACK = 0.010


def table(slow: bool, late: bool) -> list[list[float]]:
    """Seconds of each rank's steps."""
    draws = random.Random(11)
    chosen = [set(draws.sample(range(RANKS), 2)) if late else set() for _ in range(STEPS)]
    return [
        [BASE * (SLOW if slow and rank == RANKS - 1 else 1.0) + LATE * (rank in chosen[step]) for step in range(STEPS)]
        for rank in range(RANKS)
    ]


def timed(average: Any, log: list[tuple[int, list[int], float, float]]) -> None:
    """Logs when versions are executed: number, members, begin and end."""
    contribute = average._contribute

    def timed_contribute(version: int, members: tuple[int, ...]) -> Any:
        began = time.monotonic()
        execution = contribute(version, members)
        log.append((version, list(members), began, time.monotonic()))
        return execution

    average._contribute = timed_contribute


def on_rank(kind: str, slow: bool, late: bool) -> None:
    """One rank: trains, and prints what it has measured."""
    comm.init(timeout=60)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, seconds = comm.rank(), table(slow, late)
    digest = hashlib.sha256(json.dumps(seconds).encode()).hexdigest()
    assert len({*comm.world().all_gather_object(digest)}) == 1
    layers = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUTPUTS)
    module = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model: Any
    if kind == "all-reduce":
        model = GradientAllReduce(module)
    elif kind == "wagma":
        model = Wagma(module, optimizer, period=PERIOD)
    else:
        model = AsyncModelAverage(module, optimizer, interval_ms=INTERVAL_MS)
    log: list[tuple[int, list[int], float, float]] = []
    if kind == "wagma":
        timed(model.average, log)
    waits, done = [], 0
    comm.world().barrier().wait()
    began = time.monotonic()
    # As long as the slowest rank that trains alone at its own pace would take; synchronous ones take all steps.
    limit = sum(seconds[0]) if kind == "average" else float("inf")
    for step in range(STEPS if kind != "average" else 10 * STEPS):
        if time.monotonic() - began >= limit:
            break
        x = torch.randn(BATCH, INPUTS)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        time.sleep(seconds[rank][step % STEPS])
        optimizer.step()
        done += 1
        if kind == "wagma":
            at = time.monotonic()
            model.wait()
            waits.append((step, at, time.monotonic() - at))
    ended = time.monotonic()
    found = {"began": began, "ended": ended, "steps": done, "waits": waits, "log": log}
    found["rounds"] = model.stats().rounds
    if kind == "wagma":
        found["fresh"] = model.stats().fresh
    model.close()
    print("FOUND", json.dumps(found), flush=True)
    comm.shutdown()


def measured(kind: str, slow: bool, late: bool) -> list[dict[str, Any]]:
    """What each rank has found."""
    found = []
    for result in run_processes(on_rank, RANKS, args=(kind, slow, late), timeout=300):
        if result.returncode:
            raise RuntimeError(f"{kind} failed:\n{result.stdout}\n{result.stderr}")
        line = next(line for line in result.stdout.splitlines() if line.startswith("FOUND"))
        found.append(json.loads(line.removeprefix("FOUND")))
    return found


def duration(found: Sequence[dict[str, Any]]) -> float:
    """Seconds from the first rank's beginning to the last one's end."""
    return max(each["ended"] for each in found) - min(each["began"] for each in found)


def waits(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Waits outside of synchronisations, in seconds and against what they had to wait for."""
    logs = [{version: (members, began, ended) for version, members, began, ended in each["log"]} for each in found]
    exchanges = [ended - began for log in logs for version, (_, began, ended) in log.items() if (version + 1) % PERIOD]
    exchange = statistics.median(exchanges)
    excess, plain = [], []
    for rank, each in enumerate(found):
        for version, at, taken in each["waits"]:
            if (version + 1) % PERIOD == 0:
                continue
            members = logs[rank][version][0]
            owed = max(sum(1 for older in range(version) if logs[member][older][2] > at) for member in members)
            plain.append(taken)
            excess.append(taken - (1 + owed) * exchange - SLACK)
    return {
        "exchange_ms": 1e3 * exchange,
        "median_wait_ms": 1e3 * statistics.median(plain),
        "p95_wait_ms": 1e3 * statistics.quantiles(plain, n=20)[-1],
        "longest_wait_ms": 1e3 * max(plain),
        "waits": len(plain),
        "beyond_the_limit": sum(each > 0 for each in excess),
        "furthest_beyond_ms": 1e3 * max(max(excess), 0.0),
    }


def model_ratio(seconds: Sequence[Sequence[float]]) -> float:
    """How many times as long all-reduce takes as wait-avoiding averages, if nothing but steps takes time."""
    reduce = sum(max(rank[step] for rank in seconds) for step in range(STEPS))
    windows = range(0, STEPS, PERIOD)
    avoiding = sum(max(sum(rank[first : first + PERIOD]) for rank in seconds) for first in windows)
    return reduce / avoiding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    console = Console()
    reduce, wagma = measured("all-reduce", False, True), measured("wagma", False, True)
    alone, beside = measured("average", False, False), measured("average", True, False)
    slow = measured("wagma", True, False)
    ratio = model_ratio(table(False, True))
    rates = [sum(each["steps"] / (each["ended"] - each["began"]) for each in found) for found in (alone, beside)]
    rounds = [min(each["rounds"] / (each["ended"] - each["began"]) for each in found) for found in (alone, beside)]
    waited = waits(wagma)
    rows = {
        "throughput over the model's": (duration(reduce) / duration(wagma) / ratio, 0.92),
        "examples with a slow rank over the ideal": (rates[1] / rates[0] / ((RANKS - 1 + 1 / SLOW) / RANKS), 0.95),
        "rounds with a slow rank over those without": (rounds[1] / rounds[0], 0.90),
    }
    told = {
        "seconds": {"all-reduce": duration(reduce), "wagma": duration(wagma), "wagma, slow rank": duration(slow)},
        "model_ratio": ratio,
        "fresh": statistics.fmean(each["fresh"] for each in wagma),
        "wait": waited,
    }
    shown = Table(title=f"{RANKS} ranks, {STEPS} steps of {1e3 * BASE:g} ms")
    for column in ("", "figure", "at least"):
        shown.add_column(column, justify="right" if column else "left")
    for name, (figure, least) in rows.items():
        shown.add_row(name, f"{figure:.3f}", f"{least:.2f}")
    console.print(shown)
    console.print_json(json.dumps(told))
    if options.output:
        found = {"bars": {name: {"figure": figure, "least": least} for name, (figure, least) in rows.items()}, **told}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
