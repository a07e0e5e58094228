"""The table of outer steps in `docs/outer-steps.md`."""

from __future__ import annotations

from typing import Any

from bench.short_runs import report


def table(results: dict[str, Any]) -> str:
    """A row for each run, a column for each number of ranks: nats above the best fixed pair, above plain means, and that pair."""
    rows = {row["cell"]: row for row in report.summary(results["losses"])}
    places = sorted({(report.rounds_of(name), *name.split(", ")[2:]) for name in rows})
    ranks = sorted({int(name.split(", ")[1].split()[0]) for name in rows})
    lines = [f"| rounds | weights | optimizer | {' | '.join(f'{number} ranks' for number in ranks)} |"]
    lines.append("|---|---|---|" + "---|" * len(ranks))
    for rounds, start, optimizer in places:
        shown = [_shown(rows.get(f"{rounds} rounds, {number} ranks, {start}, {optimizer}")) for number in ranks]
        names = "new" if start == "scratch" else "trained", {"adamw": "AdamW", "muon": "Muon"}[optimizer]
        lines.append(f"| {rounds} | {' | '.join(names)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    lr, momentum = row["nesterov"]["best"].split()[1:]
    return f"{row['above_best']:+.3f}, {row['above_means']:+.3f} ({lr}, {momentum})"
