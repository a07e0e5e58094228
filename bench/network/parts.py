"""Runs the parts of a measurement on emulated hosts, and keeps what each has found as soon as it has."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.netlab import lab as netlab

Rows = list[dict[str, Any]]
Part = tuple[Callable[[], Rows], Callable[[Console, Rows], None]]


def new_ones(old: Rows, new: Rows) -> Rows:
    return new


def run_parts(
    parts: Mapping[str, Part], only: str, output: Path | None, merge: Callable[[Rows, Rows], Rows] = new_ones
) -> int:
    """Measures parts and shows their rows.

    Args:
        parts: for each name what measures its rows, and what shows them.
        only: names of those to run, with commas between them.
        output: JSON file of rows by part; parts that are not run keep what it holds.
        merge: makes of a part's rows in there and new ones those to write.

    Returns:
        The exit status: 1 where hosts cannot be emulated.
    """
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    console = Console(width=150)
    results: dict[str, Any] = {}
    if output and output.exists():
        results = json.loads(output.read_text())
    for name in only.split(","):
        started = time.perf_counter()
        measure, show = parts[name]
        rows = measure()
        seconds = time.perf_counter() - started
        results[name] = merge(results.get(name, []), rows)
        results["machine"] = {"cpus": os.cpu_count()}
        if output:
            output.write_text(json.dumps(results, indent=1) + "\n")
        show(console, rows)
        console.print(f"{name}: {seconds:.0f} s")
    return 0
