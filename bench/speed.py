"""Measures all rows in turns in one process: `python -m bench.speed [--output bench/results/cpu.json]`.

Some groups alone go to a file of their own: `--groups "sparse outer step" --output bench/results/sparse_outer.json`.

A shared machine has another speed a minute later. Therefore the rows of a group take turns, with one run each per round, and
their medians over the rounds are compared.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.workloads import groups as workloads
from bench.workloads.rivals import EAGER
from bench.workloads.rows import COPY, SCALE, Workload

Clock = Callable[[Callable[[], object]], float]


def host_clock(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(groups: Iterable[list[Workload]], rounds: int, clock: Clock, warmup: int = 2) -> list[dict[str, Any]]:
    """Times each group's rows in turns.

    Returns:
        A dict per row: group, subject, name, bytes, seconds (median, least, greatest), gb_per_s, and its share of the
        roof's. A fused path has times_unfused, the speed relative to the path that it replaces, and times_torch, that relative
        to PyTorch operations. The row's own values follow.
    """
    results = []
    for rows in groups:
        runs = [row.prepare() for row in rows]
        seconds: list[list[float]] = [[] for _ in rows]
        order = random.Random(0)
        for turn in range(warmup + rounds):
            # In another order each time: none always follows the one that leaves the caches worst.
            for index in order.sample(range(len(rows)), len(rows)):
                taken = clock(runs[index])
                if turn >= warmup:
                    seconds[index].append(taken)
        del runs
        gc.collect()
        results += compared(rows, [result(row, taken) for row, taken in zip(rows, seconds, strict=True)])
    return results


def compared(rows: list[Workload], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One group's results with what follows from several of them."""
    roof = next(r["gb_per_s"] for r in results if r["name"] in (COPY, SCALE))
    medians = {(r["subject"], r["name"]): r["median_s"] for r in results}
    for row, r in zip(rows, results, strict=True):
        r["share_of_roof"] = r["gb_per_s"] / roof
        if row.unfused:
            r["times_unfused"] = medians[row.unfused, row.name] / r["median_s"]
            if (row.subject, EAGER) in medians:
                r["times_torch"] = medians[row.subject, EAGER] / r["median_s"]
    return results


def result(row: Workload, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "group": row.group,
        "subject": row.subject,
        "name": row.name,
        "bytes": row.bytes,
        "median_s": median,
        "least_s": min(seconds),
        "greatest_s": max(seconds),
        "gb_per_s": row.bytes / median / 1e9,
        **row.info(),
    }


def table(results: list[dict[str, Any]], title: str) -> Table:
    """GB/s and share of the roof's, a section a group."""
    grid = Table("", "", "", title=title, title_justify="left")
    times = ("times unfused", "times torch")
    for heading in ("median ms", "least–greatest ms", "GB/s", "of roof", *times, "bytes/element", "error"):
        grid.add_column(heading, justify="right")
    for index, row in enumerate(results):
        first = index == 0 or results[index - 1]["group"] != row["group"]
        if first and index:
            grid.add_section()
        grid.add_row(
            row["group"] if first else "",
            row["subject"],
            row["name"],
            f"{row['median_s'] * 1e3:.3f}",
            f"{row['least_s'] * 1e3:.3f}–{row['greatest_s'] * 1e3:.3f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['share_of_roof']:.0%}",
            f"{row['times_unfused']:.2f}" if "times_unfused" in row else "",
            f"{row['times_torch']:.2f}" if "times_torch" in row else "",
            f"{row['bytes_per_element']:.4f}" if "bytes_per_element" in row else "",
            f"{row['relative_error']:.2e}" if "relative_error" in row else "",
        )
    return grid


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return named[0] if named else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": processor(),
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": metadata.version("numba") if find_spec("numba") else "",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def check_groups(names: Iterable[str], known: Iterable[str], output: Path | None) -> None:
    """Raises ValueError for groups that are unknown, and for a file that has rows of others, which would be lost."""
    unknown = sorted({*names} - {*known})
    if unknown:
        raise ValueError(f"there is no group {', '.join(unknown)}; known are {', '.join(known)}")
    if output and output.exists():
        others = sorted({row["group"] for row in json.loads(output.read_text())["rows"]} - {*names})
        if others:
            raise ValueError(f"{output} has other groups, such as {others[0]}, which would be lost; name another file")


def console(record: bool = False) -> Console:
    """Wide enough for the tables, also where output goes to a file."""
    return Console(width=max(Console().width, 170), record=record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--codec-elements", type=int, default=workloads.CODEC_ELEMENTS)
    parser.add_argument("--adamw-elements", type=int, default=workloads.ADAMW_ELEMENTS)
    parser.add_argument("--groups", nargs="+", metavar="NAME", help="groups to measure, all by default")
    options = parser.parse_args()
    if min(options.rounds, options.codec_elements, options.adamw_elements) < 1:
        parser.error("rounds and elements must be 1 or more")

    device = torch.device("cpu")
    described = machine()
    groups = [
        *workloads.codec_groups(device, options.codec_elements),
        *workloads.elementwise_groups(device, options.adamw_elements),
    ]
    if options.groups:
        try:
            check_groups(options.groups, [rows[0].group for rows in groups], options.output)
        except ValueError as error:
            parser.error(str(error))
        groups = [rows for rows in groups if rows[0].group in options.groups]
    results = measure(groups, options.rounds, host_clock)
    title = f"{described['cpu']}, {described['cores']} cores: medians of {options.rounds} rounds in turns"
    console().print(table(results, title))
    if options.output:
        sizes = {"codec_elements": options.codec_elements, "adamw_elements": options.adamw_elements}
        write(options.output, {"machine": described, "rounds": options.rounds, **sizes, "rows": results})


if __name__ == "__main__":
    main()
