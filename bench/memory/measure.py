"""Peak memory of training at 124 M parameters on two ranks of this machine, beside the formula on each algorithm's page.

python -m bench.memory [--scale 1] [--algorithms diloco wagma] [--output bench/results/memory.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bagua_kernels.algorithms.models.model_algorithm import BUCKET_BYTES
from bagua_kernels.comm.testing import run_processes
from bench.memory import pages, rank

# By the name of a row: its spec.
SPECS = {
    "plain": "plain",
    "ddp": "ddp",
    "allreduce": "allreduce",
    "bytegrad": "bytegrad",
    "topk": "topk",
    "powersgd": "powersgd",
    "decentralized": "decentralized",
    "d2": "d2",
    "sgp": "sgp",
    "lowprec": "lowprec",
    "choco": "choco",
    "local_sgd": "local_sgd:interval=2",
    "diloco": "diloco:interval=2",
    "sparse_loco": "sparse_loco:interval=2",
    "wagma": "wagma",
    "async_model_average": "async_model_average:interval=1",
    "async_decentralized": "async_decentralized",
}
# By the name of a row: its page with a formula.
PAGES = {
    "allreduce": "gradient-all-reduce",
    "bytegrad": "bytegrad",
    "topk": "topk",
    "powersgd": "powersgd",
    "decentralized": "decentralized",
    "d2": "d2",
    "sgp": "stochastic-gradient-push",
    "lowprec": "low-precision-decentralized",
    "choco": "choco",
    "local_sgd": "local-sgd",
    "diloco": "diloco",
    "sparse_loco": "sparse-loco",
    "wagma": "wagma",
    "async_model_average": "async-model-average",
    "async_decentralized": "async-decentralized",
}
_STEPS = 6
_SHARE, _BYTES, _OF = 0.05, 100e6, 124e6  # by how much a formula may be wrong, the bytes for so many parameters
_FIXED = 16e6  # bytes that do not depend on the model: of messages under way, and of what threads keep
_BUCKET = BUCKET_BYTES // 4  # elements of a bucket, where no tensor has more


def expected(name: str, row: dict[str, Any]) -> tuple[float, float] | None:
    """Returns what the formula of a row's page gives in bytes, and by how much that may be wrong; None without a formula."""
    if name not in PAGES:
        return None
    n = row["parameters"]
    bucket = min(n, _BUCKET)
    found = pages.value(pages.formula(PAGES[name]), {"N": n, "B": max(row["largest"], bucket), "C": bucket})
    return found, _SHARE * found + max(_FIXED, _BYTES * n / _OF)


def measure(spec: str, scale: float) -> dict[str, Any]:
    """Returns the largest bytes of two ranks; see `rank.measure`."""
    size = 1 if spec == "plain" else 2
    results = run_processes(rank.main, size, args=(spec, scale, _STEPS), timeout=900, fresh=True)
    found = []
    for each in results:
        line = next((line for line in each.stdout.splitlines() if line.startswith("RESULT ")), None)
        if line is None:
            raise RuntimeError(f"{spec}: a rank ended with {each.returncode}:\n{each.stdout}{each.stderr}")
        found.append(json.loads(line.removeprefix("RESULT ")))
    return {key: max(one[key] for one in found) for key in found[0]}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="parameters, in units of 124 M")
    parser.add_argument("--algorithms", nargs="*", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--output", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    plain = measure("plain", options.scale)
    n = 4 * plain["parameters"]
    print(f"N = {plain['parameters']:,}; plain loop {plain['training'] / n:.2f} times the model's bytes", flush=True)
    for name in options.algorithms:
        if name == "plain":
            continue
        row = rows[name] = measure(SPECS[name], options.scale)
        row["beyond"] = row["training"] - plain["training"]
        formula = expected(name, row)
        if formula is not None:
            row["formula"], allowed = formula
            # What depends on who comes first is in the formula as a whole.
            row["holds"] = row["beyond"] <= row["formula"] + allowed
        text = "  ".join(
            f"{key} {row[key] / n:6.2f}" for key in ("wrapping", "beyond", "formula", "state") if key in row
        )
        text += "" if row.get("holds", True) else "  the formula does not hold"
        print(f"{name:22} {text}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"plain": plain, "algorithms": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
