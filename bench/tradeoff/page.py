"""The table of seconds until models are as good as with all-reduce, in `docs/models.md`."""

from __future__ import annotations

from typing import Any

from bench import markdown
from bench.convergence.models import MODELS
from bench.convergence.row import BASELINE

NEVER = "–"


def table(results: dict[str, Any]) -> str:
    """A row for each model and way: for each network milliseconds of a step, and how many times sooner the loss is there."""
    # A model whose curves are still to come has no summary.
    found = {name: results[name]["summary"] for name in MODELS if "summary" in results.get(name, {})}
    rates = sorted({row["rate"] for rows in found.values() for row in rows})
    headings = ["model", "row", *(f"{rate:,g} Mbit/s: {part}" for rate in rates for part in ("ms", "times"))]
    lines = []
    for name, rows in found.items():
        places = {(row["row"], row["rate"]): row for row in rows}
        for label in dict.fromkeys(row["row"] for row in rows):
            line = [name, label]
            for rate in rates:
                line += _cells(places.get((label, rate)), places.get((BASELINE, rate)))
            lines.append(line)
    return markdown.table(headings, lines)


def _cells(row: dict[str, Any] | None, base: dict[str, Any] | None) -> list[str]:
    """The two cells of a way on one network, which are empty where it was not measured."""
    if row is None or base is None:
        return ["", ""]
    times = NEVER if row["seconds_loss"] is None else f"{base['seconds_loss'] / row['seconds_loss']:.2f}"
    if "chosen" in row:
        times += f" ({row['chosen']})"
    return [f"{1e3 * row['seconds_per_step']:.1f}", times]
