"""How good a tuner's choice is: its step over the best of what it may choose, and what the search for it has cost."""

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
from bench.training.turns import measure, tuned

AUTO, PLAIN = "auto", "allreduce"
CLASS = (PLAIN, "bytegrad", "int8", "int4", "sign", "topk", "powersgd 1", "powersgd 2", "powersgd 4")
RATES = (100.0, 500.0, 1000.0, None)
DELAY, DELAYED_RATE = 10.0, 500.0  # ms one way
FIRST = 60  # steps within which it has decided


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host."""
    rows, order = [], random.Random(7)
    for rate in settings["rates"]:
        links.set(None)
        auto = Rival(AUTO, settings["model"])
        algorithm = auto.algorithm
        assert isinstance(algorithm, algorithms.AutoTune)
        links.set(rate)
        tuning = tuned(c, settings["budget"], None)
        auto.follow(tuning)
        together(c)
        began, decided = time.monotonic(), FIRST + 1
        for step in range(1, FIRST + 1):
            auto.step()
            if algorithm.search.state == "chosen":
                decided = min(decided, step)
        seconds = max(c.all_gather_object(time.monotonic() - began))
        links.set(None)
        rivals = {name: Rival(name, settings["model"]) for name in CLASS}
        for rival in rivals.values():
            rival.warm_up()
        links.set(rate)
        for rival in rivals.values():
            rival.follow(tuning)
        rounds, counted = (1, 3) if rate is not None and rate <= 100 else (4, 4)
        taken, _ = measure(c, {**rivals, AUTO: auto}, rounds, counted, order)
        row = {"rate_mbit": rate, "times": taken, "first_seconds": seconds, "decided": decided}
        rows.append({**row, "chosen": algorithm.search.current, "predicted": algorithm.search.predicted})
        for rival in (*rivals.values(), auto):
            rival.close()
        rivals.clear()
        del auto, algorithm
        gc.collect()
    return {"rows": rows}


def described(told: dict[str, Any], model: str, delay: float | None) -> list[dict[str, Any]]:
    """A row for each rate."""
    found = []
    for row in told["rows"]:
        seconds = {name: statistics.median(each) for name, each in row["times"].items()}
        best = min(CLASS, key=lambda name: seconds[name])
        place = {"model": model, "rate_mbit": row["rate_mbit"], **({} if delay is None else {"delay_ms": delay})}
        ratios = {
            "over_best": seconds[AUTO] / seconds[best],
            "over_plain": seconds[AUTO] / seconds[PLAIN],
            "first_over_choice": row["first_seconds"] / (FIRST * seconds[AUTO]),
        }
        kept = {name: row[name] for name in ("chosen", "decided", "first_seconds", "predicted")}
        found.append(
            {**place, **kept, "best": best, **ratios, "seconds": seconds, "load_average": told["load_average"]}
        )
    return found


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints what was chosen, and the ratios."""
    table = Table(title="a tuner's choice, 4 hosts")
    for column in (
        "model",
        "Mbit/s",
        "ms",
        "chosen",
        "fastest",
        "over it",
        "over exact",
        "decided",
        "first 60 over choice",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        rate = "no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:g}"
        ratios = (f"{row[name]:.3f}" for name in ("over_best", "over_plain"))
        table.add_row(
            *(row["model"], rate, f"{row.get('delay_ms', 0):g}", row["chosen"], row["best"], *ratios),
            *(str(row["decided"]), f"{row['first_over_choice']:.2f}"),
        )
    console.print(table)
