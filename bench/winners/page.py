"""The table of winners in `docs/choosing.md`, from what was measured."""

from __future__ import annotations

import re
from typing import Any

from bench import markdown
from bench.winners.report import CHOICES, summary

LABELS = {
    "ddp": "`DistributedDataParallel`",
    "allreduce": "[`GradientAllReduce`](algorithms/gradient-all-reduce.md)",
    "bytegrad": "[`ByteGrad`](algorithms/bytegrad.md)",
    "int4": '[`CompressedAllReduce(codec="absmax_int4")`](algorithms/compressed-all-reduce.md)',
    "powersgd 4": "[`PowerSGD(rank=4)`](algorithms/powersgd.md)",
    "sign": "[`SignSGD`](algorithms/signsgd.md)",
    "topk": "[`TopK(ratio=0.01)`](algorithms/topk.md)",
    "local_sgd": "[`LocalSGD(interval=16)`](algorithms/local-sgd.md)",
    "diloco int4": '[`DiLoCo(codec="absmax_int4", delay=10)`](algorithms/diloco.md)',
    "sparse_loco delayed": "[`SparseLoCo(delay=29)`](algorithms/sparse-loco.md)",
}
CLASSES = {name: re.sub(r"^\[?`(\w+).*", r"`\1`", label) for name, label in LABELS.items()}
_UNIT = 1000.0  # Mbit/s of one Gbit/s


def table(results: dict[str, Any]) -> str:
    """A row for each network, with what is predicted to be fastest, for most models first; and how many cells are right.

    Wrong cells are marked, with each model for which something else was more than 5 % faster, and what that was.
    """
    cells, rows = results["cells"], []
    for rate, delay in sorted({(cell["rate_mbit"], cell["delay_ms"]) for cell in cells}):
        here = [cell for cell in cells if (cell["rate_mbit"], cell["delay_ms"]) == (rate, delay)]
        speed = f"{rate / _UNIT:g} Gbit/s" if rate >= _UNIT else f"{rate:g} Mbit/s"
        shown = (_shown([cell for cell in here if cell["choice"] == choice]) for choice in CHOICES)
        rows.append([f"{speed}, {delay:g} ms", *shown])
    told = summary(cells)
    right = f"Right are {told['right']} of {told['cells']} predictions that were measured, {told['share']:.0%}."
    return "\n".join([markdown.table(["network", *CHOICES], rows), "", right])


def _shown(cells: list[dict[str, Any]]) -> str:
    """What is predicted for the models of one network and choice."""
    models: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        models.setdefault(cell["predicted"], []).append(cell)
    shown = []
    for name, own in sorted(models.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        which = f" ({', '.join(cell['model'] for cell in own)})" if len(models) > 1 else ""
        faster = [f"{cell['model']}: {CLASSES[cell['measured']]}" for cell in own if not cell.get("right", True)]
        shown.append(LABELS[name] + which + (f" ✗ {', '.join(faster)}" if faster else ""))
    return "; ".join(shown)
