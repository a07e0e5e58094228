"""The table of seconds until models are as good as with all-reduce, in `docs/models.md`."""

from __future__ import annotations

from typing import Any

from bench import markdown
from bench.convergence.models import MODELS
from bench.convergence.row import BASELINE

NEVER = "–"


def table(results: dict[str, Any]) -> str:
    """A row for each model and way: for each network milliseconds of a step, and how many times sooner the loss is there."""
    found = {name: results[name]["summary"] for name in MODELS if name in results}
    rates = sorted({row["rate"] for rows in found.values() for row in rows})
    headings = ["model", "row", *(f"{rate:,g} Mbit/s: {part}" for rate in rates for part in ("ms", "times"))]
    lines = []
    for name, rows in found.items():
        base = {row["rate"]: row["seconds_loss"] for row in rows if row["row"] == BASELINE}
        for label in dict.fromkeys(row["row"] for row in rows):
            cells = []
            for rate in rates:
                row = next((row for row in rows if (row["row"], row["rate"]) == (label, rate)), None)
                cells += ["", ""] if row is None else [f"{1e3 * row['seconds_per_step']:.1f}", _times(row, base[rate])]
            lines.append([name, label, *cells])
    return markdown.table(headings, lines)


def _times(row: dict[str, Any], plain: float) -> str:
    own = row["seconds_loss"]
    chosen = f" ({row['chosen']})" if "chosen" in row else ""
    return f"{NEVER if own is None else f'{plain / own:.2f}'}{chosen}"
