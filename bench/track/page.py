"""The table of the track in `docs/track.md`."""

from __future__ import annotations

from typing import Any

from bench import markdown
from bench.track.cell import CELLS

OURS = "bagua_kernels"
FAILED = "not trained"


def table(results: dict[str, Any]) -> str:
    """A row for each entrant: its loss and the MB that all ranks have sent, in each cell. The best loss of a cell is bold.

    Entrants come by their mean losses over the cells. Below is who leads in each cell: other packages first, of
    which the best is compared with the best of this one.
    """
    cells = [cell for cell in CELLS if results["cells"].get(cell.name)]
    rows = [results["cells"][cell.name] for cell in cells]
    names = {name: row for found in rows for name, row in found.items()}

    def loss(name: str) -> float:
        losses = [found[name].get("loss", float("inf")) for found in rows if name in found]
        return sum(losses) / len(losses)

    least = [min(row.get("loss", float("inf")) for row in found.values()) for found in rows]
    shown = []
    for name in sorted(names, key=loss):
        row = names[name]
        package = "this one" if row["package"] == OURS else f"{row['package']} {row.get('version', '')}".strip()
        own = [_shown(found.get(name), best) for found, best in zip(rows, least, strict=True)]
        shown.append([row["title"], package, *own])
    lines = [markdown.table(["entrant", "package", *(cell.title for cell in cells)], shown), ""]
    found = leads(results)
    for cell in sorted((cell for cell in cells if cell.name in found), key=lambda cell: found[cell.name][2]):
        ours, rival, lead = found[cell.name]
        first, second = (names[name]["title"] for name in ((ours, rival) if lead > 0 else (rival, ours)))
        others = "other packages" if lead > 0 else "this one"
        lines.append(f"- {cell.title}: {first} leads, by {abs(lead):.3f} nats before {second}, the best of {others}.")
    return "\n".join(lines)


def _shown(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return ""
    if "loss" not in row:
        return FAILED
    bold = "**" if row["loss"] == best else ""
    return f"{bold}{row['loss']:.3f}{bold}, {row['bytes'] / 1e6:,.0f} MB"


def leads(results: dict[str, Any]) -> dict[str, tuple[str, str, float]]:
    """For each cell the best of ours, the best rival, and by how many nats the former's loss is lower."""
    found = {}
    for cell in CELLS:
        trained = {n: row for n, row in results["cells"].get(cell.name, {}).items() if "loss" in row}
        sides = [[n for n, row in trained.items() if (row["package"] == OURS) is own] for own in (True, False)]
        if all(sides):
            ours, rival = (min(side, key=lambda name: trained[name]["loss"]) for side in sides)
            found[cell.name] = ours, rival, trained[rival]["loss"] - trained[ours]["loss"]
    return found
