"""The tables of `pytest bench`: one a question, a row an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.table import Table

from bench.workloads.rows import COPY, SCALE


def tables(benchmarks: Iterable[Any]) -> Iterator[Table]:
    """A table for each group of pytest-benchmark's results, in the order in which they were measured."""
    groups: dict[str, list[Any]] = {}
    for one in benchmarks:
        groups.setdefault(one.group, []).append(one)
    for name, rows in groups.items():
        yield table(name, rows)


def table(name: str, rows: list[Any]) -> Table:
    """Median, GB/s and the share of what a copy of the same vector reaches in the same group."""
    elements = rows[0].extra_info["elements"]
    grid = Table("what", "by", title=f"{name}: {elements:,} elements", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("median ms", "GB/s", "of copy"):
        grid.add_column(heading, justify="right", no_wrap=True)
    speeds = {row.extra_info["answer"]: row.extra_info["gb_per_s"] for row in rows}
    roof = speeds.get(COPY, speeds.get(SCALE))
    for row in rows:
        speed = row.extra_info["gb_per_s"]
        grid.add_row(
            row.extra_info["subject"],
            row.extra_info["answer"],
            f"{row.stats.median * 1e3:.3f}",
            f"{speed:.1f}",
            f"{speed / roof:.0%}" if roof else "",
        )
    return grid
