"""The table of winners in `docs/choosing.md`, from what was measured."""

from __future__ import annotations

import re
from typing import Any

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
    cells = results["cells"]
    lines = [f"| network | {' | '.join(CHOICES)} |", "|---|" + "---|" * len(CHOICES)]
    for rate, delay in sorted({(cell["rate_mbit"], cell["delay_ms"]) for cell in cells}):
        speed = f"{rate / _UNIT:g} Gbit/s" if rate >= _UNIT else f"{rate:g} Mbit/s"
        row = [f"{speed}, {delay:g} ms"]
        for choice in CHOICES:
            here = [c for c in cells if (c["rate_mbit"], c["delay_ms"], c["choice"]) == (rate, delay, choice)]
            names = [cell["predicted"] for cell in here]
            shown = []
            for name in sorted(set(names), key=lambda name: (-names.count(name), name)):
                wrong = [cell for cell in here if cell["predicted"] == name and not cell.get("right", True)]
                faster = ", ".join(f"{cell['model']}: {CLASSES[cell['measured']]}" for cell in wrong)
                models = (
                    ""
                    if len(set(names)) == 1
                    else f" ({', '.join(c['model'] for c in here if c['predicted'] == name)})"
                )
                shown.append(LABELS[name] + models + (f" ✗ {faster}" if wrong else ""))
            row.append("; ".join(shown))
        lines.append("| " + " | ".join(row) + " |")
    told = summary(cells)
    lines += ["", f"Right are {told['right']} of {told['cells']} predictions that were measured, {told['share']:.0%}."]
    return "\n".join(lines)
