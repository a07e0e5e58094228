"""How soon a rank that is in the middle of a backward pass takes part in an average that another rank has started."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bagua_kernels import comm
from bench.network.rank import together
from bench.training.rivals import Rival

RATE = 500.0  # Mbit/s
STEPS = 60
# The 95th percentile, in steps.
MOST = 0.5
_LATE = 0.4  # part of the steps in which a rank goes through its batch twice


def logged(rival: Rival) -> tuple[dict[int, float], dict[int, tuple[float, bool]]]:
    """When this rank came to each version, and when its model was read for it, and whether it was in a backward pass then."""
    algorithm: Any = rival.algorithm
    average, model = algorithm.average, algorithm.model
    arrived: dict[int, float] = {}
    reads: dict[int, tuple[float, bool]] = {}
    arrive, read, backward = average.arrive, model.read, rival.backward
    state = {"backward": False}

    def timed_arrive(version: int) -> None:
        arrived[version] = time.monotonic()
        arrive(version)

    def timed_read(out: Any) -> Any:
        reads[average.next] = time.monotonic(), state["backward"]
        return read(out)

    def marked_backward() -> None:
        state["backward"] = True
        backward()
        state["backward"] = False

    average.arrive, model.read, rival.backward = timed_arrive, timed_read, marked_backward  # type: ignore[method-assign]
    return arrived, reads


def on_rank(c: comm.Communicator, links: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each host."""
    links.set(None)
    rival, draws = Rival("wagma", settings["model"]), random.Random(c.rank)
    rival.warm_up()
    links.set(RATE)
    arrived, reads = logged(rival)
    together(c)
    began = time.monotonic()
    for _ in range(settings["steps"]):
        if draws.random() < _LATE:
            rival.backward()
        rival.step()
    seconds = (time.monotonic() - began) / settings["steps"]
    algorithm: Any = rival.algorithm
    average = algorithm.average
    members = {version: average.members(version) for version in reads}
    told = {"arrived": arrived, "reads": reads, "members": members, "seconds": seconds, "period": algorithm.period}
    everyone: list[dict[str, Any]] = c.all_gather_object(told)
    c.barrier().wait()
    links.set(None)
    rival.close()
    return {"ranks": everyone}


def described(told: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """One row: latencies of reads of ranks that had not come to the version, and owed no earlier one."""
    latencies, ranks = [], told["ranks"]
    for rank in ranks:
        for version, (read, in_backward) in rank["reads"].items():
            own = rank["arrived"].get(version)
            starts = [
                ranks[peer]["arrived"][version]
                for peer in rank["members"][version]
                if version in ranks[peer]["arrived"]
            ]
            synchronises = rank["period"] and (int(version) + 1) % rank["period"] == 0
            if synchronises or not in_backward or not starts or (own is not None and own <= read):
                continue
            before = rank["reads"].get(version - 1 if isinstance(version, int) else str(int(version) - 1))
            if before is not None and before[0] > min(starts):
                continue  # it owed an earlier version when this one was started
            latencies.append(read - min(starts))
    step = statistics.fmean(rank["seconds"] for rank in ranks)
    ordered = sorted(latencies)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0
    row = {"model": model, "rate_mbit": RATE, "seconds": {"wagma": step}, "reads": len(ordered), "most_steps": MOST}
    row |= {
        "median_ms": 1e3 * statistics.median(ordered) if ordered else 0.0,
        "p95_ms": 1e3 * p95,
        "p95_steps": p95 / step,
    }
    return [{**row, "load_average": told["load_average"]}]


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints the latencies."""
    table = Table(title="from the start of an average to the read of a rank in a backward pass")
    for column in ("model", "Mbit/s", "reads", "median ms", "p95 ms", "ms a step", "p95 in steps", "at most"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{each:.1f}" for each in (row["median_ms"], row["p95_ms"], 1e3 * row["seconds"]["wagma"]))
        table.add_row(
            *(row["model"], f"{row['rate_mbit']:g}", str(row["reads"]), *numbers),
            *(f"{row['p95_steps']:.3f}", f"{row['most_steps']:g}"),
        )
    console.print(table)
