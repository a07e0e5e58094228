"""The table of outer steps in `docs/outer-steps.md`."""

from __future__ import annotations

from typing import Any

from bench import markdown
from bench.short_runs import report, study


def table(results: dict[str, Any]) -> str:
    """A row for each run, a column for each number of ranks: nats above the best fixed pair, above plain means, and that pair."""
    rows = {row["cell"]: row for row in report.summary(results["losses"])}
    cells = [cell for cell in study.cells() if cell.name in rows]
    ranks = sorted({cell.ranks for cell in cells})
    shown: dict[tuple[int, str, str], dict[int, str]] = {}
    for cell in cells:
        shown.setdefault((cell.rounds, cell.start, cell.optimizer), {})[cell.ranks] = _shown(rows[cell.name])
    return markdown.table(
        ["rounds", "weights", "optimizer", *(f"{number} ranks" for number in ranks)],
        [
            [f"{rounds}", report.LABELS[start], report.LABELS[optimizer], *(own.get(number, "") for number in ranks)]
            for (rounds, start, optimizer), own in sorted(shown.items())
        ],
    )


def _shown(row: dict[str, Any]) -> str:
    lr, momentum = row["nesterov"]["best"].split()[1:]
    return f"{row['above_best']:+.3f}, {row['above_means']:+.3f} ({lr}, {momentum})"
