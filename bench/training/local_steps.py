"""Algorithms with local steps on slow lines: their throughput over that of the same ranks without communication."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bagua_kernels import comm
from bench.network.rank import together
from bench.training.rivals import Rival

ALONE = "alone"
BLOCKS = 3
STEPS = 60  # of a block of the ranks without communication


@dataclass(frozen=True)
class Line:
    """What is measured side by side on one line.

    Attributes:
        rate: Mbit/s.
        least: of each algorithm, the part of the throughput without communication that it must have.
        aims: likewise, what it should have.
    """

    rate: float
    least: dict[str, float]
    aims: dict[str, float]


LINES = (
    Line(100.0, {"sparse_loco": 0.93, "diloco int4": 0.93}, {"sparse_loco": 0.98, "diloco int4": 0.98}),
    Line(100.0, {"local_sgd": 0.90}, {"local_sgd": 0.95}),
    Line(10.0, {"sparse_loco delayed": 0.90}, {"sparse_loco delayed": 0.95}),
    Line(1.0, {"sparse_loco delayed": 0.75}, {"sparse_loco delayed": 0.90}),
)


def blocks(c: comm.Communicator, rivals: dict[str, Rival], rounds: int, steps: int, order: random.Random) -> Any:
    """Seconds per step of each rival in each block, until the last rank is through, and their bytes and exchanges.

    A block begins with a round that is not counted, and ends before the exchange of its last round is waited for. So as many
    exchanges are waited for within the counted steps as begin in them. Statistics are of whole blocks.
    """
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    costs: dict[str, dict[str, float]] = {name: {} for name in rivals}
    for _ in range(rounds):
        for name in order.sample(sorted(rivals), len(rivals)):
            rival = rivals[name]
            interval = getattr(rival.algorithm, "interval", 0)
            counted = max(1, round(steps / interval)) * interval if interval else steps
            together(c)
            for _ in range(interval or 3):
                rival.step()
            began = time.monotonic()
            for _ in range(counted):
                rival.step()
            ended = time.monotonic()
            rival.conclude()
            c.barrier().wait()
            moments = c.all_gather_object((began, ended))
            taken[name].append((max(e for _, e in moments) - max(b for b, _ in moments)) / counted)
            if rival.algorithm is not None:
                stats = rival.algorithm.stats()
                per = interval / stats.steps
                costs[name] = {
                    "bytes": per * stats.bytes_sent,
                    "exchange": per * stats.exchange_seconds,
                    "wait": per * stats.wait_seconds,
                }
    return taken, costs


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host: every line with its rivals."""
    order, rows = random.Random(7), []
    for line in LINES:
        # Unlimited, for parameters are broadcast when a rival is made.
        links.set(None)
        rivals = {name: Rival(name, settings["model"]) for name in (ALONE, *line.least)}
        for rival in rivals.values():
            rival.warm_up()
        links.set(line.rate)
        taken, costs = blocks(c, rivals, settings["blocks"], settings["steps"], order)
        rows.append({"rate_mbit": line.rate, "times": taken, "costs": costs})
        for rival in rivals.values():
            rival.close()
        rivals.clear()
        gc.collect()
    return {"rows": rows}


def described(told: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """A row for each line."""
    rows = []
    for line, row in zip(LINES, told["rows"], strict=True):
        times, found = row["times"], []
        for name, least in line.least.items():
            alone = times[ALONE]
            if name == "local_sgd":
                # It cannot be hidden: what it must reach is the time without it, and a round's exchange for its steps.
                exchange = row["costs"][name]["exchange"] / 16
                alone = [seconds + exchange for seconds in alone]
            shares = [a / own for a, own in zip(alone, times[name], strict=True)]
            found.append(
                {
                    "ours": name,
                    "share": statistics.median(shares),
                    "of_blocks": shares,
                    "least": least,
                    "aim": line.aims[name],
                }
            )
        seconds = {name: statistics.median(each) for name, each in times.items()}
        rows.append(
            {
                **{"model": model, "rate_mbit": row["rate_mbit"], "seconds": seconds, "costs": row["costs"]},
                **{"bars": found, "load_average": told["load_average"]},
            }
        )
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints the shares."""
    table = Table(title="throughput over that without communication, 4 hosts")
    for column in (
        "model",
        "Mbit/s",
        "",
        "ms a step",
        "alone",
        "share",
        "blocks",
        "at least",
        "aim",
        "MB a round",
        "wait s",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        for bar in row["bars"]:
            name, cost = bar["ours"], row["costs"][bar["ours"]]
            times = (f"{1e3 * row['seconds'][each]:.0f}" for each in (name, ALONE))
            shares = f"{min(bar['of_blocks']):.3f} to {max(bar['of_blocks']):.3f}"
            numbers = (f"{bar['share']:.3f}", shares, f"{bar['least']:g}", f"{bar['aim']:g}")
            table.add_row(
                row["model"],
                f"{row['rate_mbit']:g}",
                name,
                *times,
                *numbers,
                f"{cost['bytes'] / 1e6:.3f}",
                f"{cost['wait']:.2f}",
            )
    console.print(table)
