"""What averages beside training cost: step times over those of the same ranks without communication, and time spent waiting."""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bagua_kernels import algorithms, comm
from bench.network.rank import together
from bench.training.rivals import Rival

ALONE = "alone"
RATE = 100.0  # Mbit/s
BLOCKS, STEPS = 5, 64
# For each algorithm, at most how many times the step without communication, and an aim.
MOST = {"async 8 bits": (1.15, 1.08), "async float32": (1.35, 1.20)}
# Part of the time that training may wait, and an aim.
WAITING = (0.03, 0.01)


def idle(model: algorithms.AsyncModelAverage) -> None:
    """Lets a round that is under way end."""
    while not model.average.idle:  # type: ignore[attr-defined]
        time.sleep(0.01)


def blocks(c: comm.Communicator, rivals: dict[str, Rival], count: int, steps: int, order: random.Random) -> Any:
    """Seconds per step of each rival in each block, and the part of them in which training waited.

    The averages of a rival go on within its own blocks only.
    """
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    waiting: dict[str, list[float]] = {name: [] for name in rivals}
    rounds: dict[str, int] = dict.fromkeys(rivals, 0)
    for _ in range(count):
        for name in order.sample(sorted(rivals), len(rivals)):
            rival, model = rivals[name], rivals[name].algorithm
            if isinstance(model, algorithms.AsyncModelAverage):
                model.resume()
            together(c)
            for _ in range(4):
                rival.step()
            before, began = None if model is None else model.stats(), time.monotonic()
            for _ in range(steps):
                rival.step()
            ended = time.monotonic()
            if isinstance(model, algorithms.AsyncModelAverage) and before is not None:
                model.pause()
                waiting[name].append((model.stats().wait_seconds - before.wait_seconds) / (ended - began))
                rounds[name] += model.stats().rounds - before.rounds
            c.barrier().wait()
            if isinstance(model, algorithms.AsyncModelAverage):
                idle(model)
            c.barrier().wait()
            moments = c.all_gather_object((began, ended))
            taken[name].append((max(e for _, e in moments) - max(b for b, _ in moments)) / steps)
    return taken, waiting, rounds


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host."""
    # Unlimited, for parameters are broadcast when a rival is made.
    links.set(None)
    rivals = {name: Rival(name, settings["model"]) for name in (ALONE, *MOST)}
    for rival in rivals.values():
        rival.warm_up()
        if isinstance(rival.algorithm, algorithms.AsyncModelAverage):
            rival.algorithm.pause()
    c.barrier().wait()
    for rival in rivals.values():
        if isinstance(rival.algorithm, algorithms.AsyncModelAverage):
            idle(rival.algorithm)
    c.barrier().wait()
    links.set(RATE)
    taken, waiting, rounds = blocks(c, rivals, settings["blocks"], settings["steps"], random.Random(7))
    links.set(None)
    for rival in rivals.values():
        rival.close()
    rivals.clear()
    gc.collect()
    return {"times": taken, "waiting": waiting, "rounds": rounds}


def described(told: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """One row."""
    times, bars = told["times"], []
    for name, (most, aim) in MOST.items():
        ratios = [own / alone for own, alone in zip(times[name], times[ALONE], strict=True)]
        bars.append(
            {
                **{"ours": name, "ratio": statistics.median(ratios), "of_blocks": ratios, "most": most, "aim": aim},
                **{"waiting": statistics.fmean(told["waiting"][name]), "rounds": told["rounds"][name]},
            }
        )
    seconds = {name: statistics.median(each) for name, each in times.items()}
    return [{"model": model, "rate_mbit": RATE, "seconds": seconds, "bars": bars, "load_average": told["load_average"]}]


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints the ratios."""
    table = Table(title="step time over that without communication, 4 hosts")
    for column in (
        "model",
        "Mbit/s",
        "",
        "ms a step",
        "alone",
        "ratio",
        "blocks",
        "at most",
        "aim",
        "waiting",
        "rounds",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        for bar in row["bars"]:
            times = (f"{1e3 * row['seconds'][each]:.0f}" for each in (bar["ours"], ALONE))
            spread = f"{min(bar['of_blocks']):.3f} to {max(bar['of_blocks']):.3f}"
            numbers = (f"{bar['ratio']:.3f}", spread, f"{bar['most']:g}", f"{bar['aim']:g}")
            table.add_row(
                *(row["model"], f"{row['rate_mbit']:g}", bar["ours"], *times, *numbers),
                *(f"{bar['waiting']:.4f}", str(bar["rounds"])),
            )
    console.print(table)
