"""How good a tuner's choice is: its step over the best of what it may choose, and what the search for it has cost."""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bagua_kernels import algorithms, comm
from bench.network.rank import interval, together
from bench.training.rivals import Rival
from bench.training.turns import Times, measure, tuned

AUTO, PLAIN = "auto", "allreduce"
# All copies of a model with 19 M parameters would not fit into the memory side by side.
GROUPS = ((PLAIN, "bytegrad", "int8", "int4"), ("sign", "topk", "powersgd 1", "powersgd 2", "powersgd 4"))
CLASS = tuple(name for names in GROUPS for name in names)
RATES = (100.0, 500.0, 1000.0, None)
DELAY, DELAYED_RATE = 10.0, 500.0  # ms one way
FIRST = 60  # steps within which it has decided
BLIND = 500.0  # Mbit/s at which the cost model is left out, too
BEFORE, AFTER, PATIENCE = 1000.0, 100.0, 100  # Mbit/s before and after a drift, and the most steps until it is noticed
_SETTLED = 60  # steps before a drift


def searched(
    c: comm.Communicator, links: Any, settings: dict[str, Any], rate: float | None, blind: bool = False
) -> Any:
    """A tuner that has taken its first steps at a rate: its rival, those steps' seconds, when it decided, the tuning."""
    links.set(None)
    auto = Rival(AUTO, settings["model"])
    algorithm = auto.algorithm
    assert isinstance(algorithm, algorithms.AutoTune)
    if blind:
        # All candidates are as good as each other, so that each is tried, in the order of the list.
        chooser = algorithm.chooser
        chooser.predict = lambda facts: dict.fromkeys(chooser.ranked, 1.0)  # type: ignore[method-assign]
        algorithm.search.tries = len(chooser.ranked)
    links.set(rate)
    tuning = tuned(c, settings["budget"], None)
    auto.follow(tuning)
    together(c)
    began, decided = time.monotonic(), FIRST + 1
    for step in range(1, FIRST + 1):
        auto.step()
        if algorithm.search.state == "chosen":
            decided = min(decided, step)
    return auto, max(c.all_gather_object(time.monotonic() - began)), decided, tuning


def compared_at(
    c: comm.Communicator, links: Any, settings: dict[str, Any], rate: float | None, auto: Rival, tuning: Any
) -> list[Times]:
    """Seconds of steps of what a tuner has chosen beside a few at a time of all that it may choose, in turns."""
    found = []
    for names in GROUPS:
        links.set(None)
        rivals = {name: Rival(name, settings["model"]) for name in names}
        for rival in rivals.values():
            rival.warm_up()
        links.set(rate)
        for rival in rivals.values():
            rival.follow(tuning)
        # On slow links a step with exact means takes seconds, and the others do not.
        rounds, counted = (1, 3) if rate is not None and rate <= 100 and PLAIN in names else (4, 4)
        found.append(measure(c, {**rivals, AUTO: auto}, rounds, counted, random.Random(7))[0])
        for rival in rivals.values():
            rival.close()
        rivals.clear()
        gc.collect()
    return found


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host."""
    rate = settings["rate"]
    auto, seconds, decided, tuning = searched(c, links, settings, rate)
    taken = compared_at(c, links, settings, rate, auto, tuning)
    search = auto.algorithm.search
    row = {"rate_mbit": rate, "times": taken, "first_seconds": seconds, "decided": decided}
    row |= {"chosen": search.current, "predicted": search.predicted, "tried": search.tried}
    auto.close()
    if rate == BLIND and settings["blind"]:
        other, row["blind_seconds"], _, _ = searched(c, links, settings, rate, blind=True)
        other.close()
    return {"rows": [row]}


def drift_on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host: links become slower in mid-run."""
    auto, _, decided, tuning = searched(c, links, settings, BEFORE)
    algorithm = auto.algorithm
    for _ in range(_SETTLED):
        auto.step()
    before = algorithm.search.current
    links.set(AFTER)
    steps = noticed = 0
    while steps < 3 * PATIENCE and not (noticed and algorithm.search.state == "chosen"):
        auto.step()
        steps += 1
        if not noticed and algorithm.search.slower != 1.0:
            noticed = steps
    taken = compared_at(c, links, settings, AFTER, auto, tuning)
    search = algorithm.search
    told = {"decided": decided, "before": before, "noticed": noticed, "decided_again": steps, "slower": search.slower}
    auto.close()
    return {"rows": [{"rate_mbit": AFTER, "times": taken, "chosen": search.current, **told}]}


def best_of(taken: list[Times]) -> tuple[dict[str, float], str]:
    """Median seconds, as if all had been measured beside the same steps of the tuner, and the fastest of the class."""
    own = statistics.median([one for times in taken for one in times[AUTO]])
    seconds = {AUTO: own}
    for times in taken:
        factor = own / statistics.median(times[AUTO])
        seconds |= {name: factor * statistics.median(each) for name, each in times.items() if name != AUTO}
    return seconds, min(CLASS, key=lambda name: seconds[name])


def drifted(told: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """What came of a drift."""
    found = []
    for row in told["rows"]:
        seconds, best = best_of(row.pop("times"))
        ratio = seconds[AUTO] / seconds[best]
        place = {"model": model, "from_mbit": BEFORE, **row, "best": best, "over_best": ratio}
        found.append({**place, "seconds": seconds, "load_average": told["load_average"]})
    return found


def described(told: dict[str, Any], model: str, delay: float | None) -> list[dict[str, Any]]:
    """A row for each rate."""
    found = []
    for row in told["rows"]:
        seconds, best = best_of(row["times"])
        place = {"model": model, "rate_mbit": row["rate_mbit"], **({} if delay is None else {"delay_ms": delay})}
        ratios = {
            "over_best": seconds[AUTO] / seconds[best],
            "over_plain": seconds[AUTO] / seconds[PLAIN],
            "first_over_choice": row["first_seconds"] / (FIRST * seconds[AUTO]),
        }
        if "blind_seconds" in row:
            ratios["first_over_choice_without_cost_model"] = row["blind_seconds"] / (FIRST * seconds[AUTO])
        kept = {name: row[name] for name in ("chosen", "decided", "first_seconds", "predicted", "tried")}
        beside = next(times for times in row["times"] if PLAIN in times)
        spread = interval(np.array(beside[AUTO]), np.array(beside[PLAIN]))
        ratios["over_plain_interval"] = spread
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


def show_drift(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints when a drift was noticed, and what was chosen then."""
    for row in rows:
        console.print(
            f"{row['model']}: {row['before']} at {row['from_mbit']:g} Mbit/s; at {row['rate_mbit']:g} opened again after "
            f"{row['noticed']} steps, {row['chosen']} after {row['decided_again']}, {row['over_best']:.3f} of {row['best']}"
        )
