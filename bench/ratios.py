"""Ratios of pairs of jobs, of which one was the older commit's and one is the working tree's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# Of Student's distribution, by degrees of freedom: what 95 % lie within.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
MOST = max(_T) + 1  # pairs

Job = Mapping[Any, float]
Row = dict[str, Any]


def compared(pairs: Sequence[tuple[Job, Job]]) -> list[Row]:
    """A row for each name that all jobs have, of (old, new) pairs of seconds by name."""
    rows = []
    for name in [name for name in pairs[0][1] if all(name in old and name in new for old, new in pairs)]:
        logs = [math.log(new[name] / old[name]) for old, new in pairs]
        middle = statistics.fmean(logs)
        half = _T[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        seconds = [statistics.median(side[name] for side in sides) for sides in zip(*pairs, strict=True)]
        interval = [math.exp(middle - half), math.exp(middle + half)]
        rows.append(
            {
                "name": name,
                "seconds": seconds,
                "ratio": math.exp(middle),
                "interval": interval,
                "pairs": [math.exp(log) for log in logs],
            }
        )
    return rows


def verdict(row: Row, bar: float) -> str:
    """What a row shows beyond chance: "slower" or "faster" by more than `bar`; empty if neither."""
    low, high = row["interval"]
    return "slower" if low > 1 + bar else "faster" if high < 1 / (1 + bar) else ""


def show(console: Console, rows: Sequence[Row], title: str, bar: float) -> None:
    """Prints the rows of a suite."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "old s", "new s", "new / old", "95 %", "verdict"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    for row in rows:
        old, new = row["seconds"]
        low, high = row["interval"]
        numbers = f"{old:.4g}", f"{new:.4g}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
        table.add_row(row["name"], *numbers, verdict(row, bar))
    console.print(table)
