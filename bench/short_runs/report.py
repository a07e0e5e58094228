"""What the study has found: the default beside the best fixed pair and beside plain means, in each cell."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.short_runs.ways import AUTO, FIXED, MEANS, ways_of

Results = dict[str, Any]
# In tables and pictures.
LABELS = {"scratch": "new", "trained": "trained", "adamw": "AdamW", "muon": "Muon"}


def means(losses: Results, cell: str, names: list[str]) -> dict[str, float]:
    """Mean losses of ways in a cell, over the seeds that have all of them."""
    runs = [run for run in losses[cell].values() if all(name in run for name in names)]
    return {name: statistics.fmean(run[name] for run in runs) for name in names} if runs else {}


def rounds_of(cell: str) -> int:
    """The number of rounds in a cell's name."""
    return int(cell.split()[0])


def summary(losses: Results) -> list[dict[str, Any]]:
    """A row for each cell that is measured: how far the default of each family is above its best fixed pair, in nats."""
    rows = []
    for cell in losses:
        found = means(losses, cell, ways_of(rounds_of(cell)))
        if not found:
            continue
        row: dict[str, Any] = {"cell": cell, "seeds": len(losses[cell])}
        for family, auto in AUTO.items():
            if auto not in found:
                continue
            best = min((name for name in FIXED[family] if name in found), key=lambda name: found[name])
            row[family] = {"best": best, "loss": found[auto], "above_best": found[auto] - found[best]}
            row[family]["above_means"] = found[auto] - found[MEANS]
        own = row["nesterov"]
        row |= {"above_best": own["above_best"], "above_means": own["above_means"]}
        row["paper_above_best"] = found["nesterov 0.7 0.9"] - found[own["best"]]
        rows.append(row)
    return rows


def show(console: Console, losses: Results) -> None:
    """Prints a row for each cell."""
    table = Table(title="nats above the best fixed pair of each family", title_justify="left")
    headings = ("", "seeds", "best pair", "default", "above plain means", "0.7 and 0.9", "SlowMo", "SparseLoCo")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "best pair") else "right")
    for row in summary(losses):
        own = row["nesterov"]
        numbers = [own["above_best"], own["above_means"], row["paper_above_best"]]
        numbers += [row[family]["above_best"] for family in ("slow", "sparse") if family in row]
        best = own["best"].removeprefix("nesterov ")
        table.add_row(row["cell"], str(row["seeds"]), best, *(f"{number:+.3f}" for number in numbers))
    console.print(table)


def plot(losses: Results, path: Path) -> None:
    """Draws the differences to the best fixed pair by the number of rounds."""
    import matplotlib.pyplot as plt

    rows = summary(losses)
    found = {row["cell"]: means(losses, row["cell"], ways_of(rounds_of(row["cell"]))) for row in rows}
    counts = sorted({rounds_of(row["cell"]) for row in rows})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, sharey=True, layout="constrained")
    shown = {
        AUTO["nesterov"]: "default",
        MEANS: "plain means (1, 0)",
        "nesterov 0.7 0.9": "0.7 and 0.9",
        "nesterov 0.7 0.5": "0.7 and 0.5",
    }
    places = [(start, optimizer) for start in ("scratch", "trained") for optimizer in ("adamw", "muon")]
    for axis, (start, optimizer) in zip(axes.flat, places, strict=True):
        for style, (name, label) in zip(("o-", "s--", "x:", "^:"), shown.items(), strict=True):
            points: dict[int, list[float]] = {}
            for row in rows:
                begins, inner = row["cell"].split(", ")[-2:]
                if (begins, inner) == (start, optimizer):
                    own = found[row["cell"]]
                    points.setdefault(rounds_of(row["cell"]), []).append(own[name] - own[row["nesterov"]["best"]])
            ordered = sorted(points)
            axis.plot(ordered, [statistics.fmean(points[each]) for each in ordered], style, label=label)
        axis.set_title(f"{LABELS[start]} weights, {LABELS[optimizer]}", fontsize="medium")
        axis.set_xscale("log")
        axis.set_xticks(counts, [f"{count}" for count in counts])
        axis.minorticks_off()
        axis.set_ylim(-0.05, 0.3)
        axis.axhline(0, color="black", linewidth=0.6)
    for axis in axes[1]:
        axis.set_xlabel("rounds of 15 steps; means over numbers of ranks")
    for axis in axes[:, 0]:
        axis.set_ylabel("nats above the best fixed pair")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
