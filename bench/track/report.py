"""The table of a track, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.track.cell import CELLS, Cell

Row = dict[str, Any]


def line(row: Row) -> str:
    """One entrant's result in a line."""
    if "error" in row:
        return f"{row['title']} has not trained: {row['error'].splitlines()[-1]}"
    steps = sum(row["steps"]) / len(row["steps"])
    note = f" ({row['note']})" if row.get("note") else ""
    return f"{row['title']}{note}: loss {row['loss']:.3f}, {row['bytes'] / 1e6:.1f} MB, {steps:.0f} steps a rank"


def ranked(rows: dict[str, Row]) -> list[tuple[str, Row]]:
    """The entrants by their losses, and then those that have not trained."""
    return sorted(rows.items(), key=lambda pair: pair[1].get("loss", float("inf")))


def show(console: Console, cell: Cell, rows: dict[str, Row]) -> None:
    """Prints a cell."""
    table = Table(title=cell.title, title_justify="left")
    for heading in ("", "package", "loss", "MB sent", "steps a rank", "seconds"):
        table.add_column(heading, justify="left" if heading in ("", "package") else "right")
    for _, row in ranked(rows):
        package = f"{row['package']} {row.get('version', '')}"
        if "error" in row:
            table.add_row(row["title"], package, "failed", "", "", "")
            continue
        steps = " to ".join(f"{steps}" for steps in sorted({min(row["steps"]), max(row["steps"])}))
        numbers = f"{row['loss']:.3f}", f"{row['bytes'] / 1e6:.1f}", steps, f"{row['seconds']:.0f}"
        table.add_row(row["title"], package, *numbers)
    console.print(table)


def plot(results: Row, path: Path) -> None:
    """Draws losses by time, a picture for each cell: ours in colours, those of other packages dashed."""
    import matplotlib.pyplot as plt

    cells = [cell for cell in CELLS if results["cells"].get(cell.name)]
    columns = 2 if len(cells) > 1 else 1
    lines = -(-len(cells) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.2 * columns, 5.2 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    for axis, cell in zip(axes.flat, cells, strict=False):
        trained = [(name, row) for name, row in ranked(results["cells"][cell.name]) if "loss" in row]
        for place, (_, row) in enumerate(trained):
            ours = row["package"] == "bagua_kernels"
            style = {"linestyle": "-", "linewidth": 1.8} if ours else {"linestyle": "--", "linewidth": 1.2}
            times, losses = zip(*row["curve"], strict=True)
            axis.plot(times, losses, color=plt.cm.tab20(place % 20), label=f"{row['title']} {row['loss']:.3f}", **style)
        axis.set_title(cell.title, fontsize="medium")
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("loss, nats per character")
        axis.set_ylim(top=min(3.6, axis.get_ylim()[1]))
        axis.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    figure.savefig(path, dpi=110)
    plt.close(figure)
