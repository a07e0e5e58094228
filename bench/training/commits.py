"""Training steps of this working tree against those of a commit: `python -m bench.training.commits REVISION [--output FILE]`.

Whole jobs of both take turns on emulated hosts, as in `bench.training`, each time in the other order. A row is one
algorithm at one rate. Its ratio is the geometric mean over pairs of jobs of their medians' ratios, with a 95 % interval by
Student's t. No commit changes `ddp`: the distance of its ratio from 1 is the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.netlab import lab as netlab
from bench.training.measure import rates_of, run

_ROOT = Path(__file__).resolve().parents[2]
_HOSTS = 4
# Four ranks' copies of more would not fit into the caches, nor into the memory.
_GROUPS = {
    "gradients": [
        ["ddp", "allreduce", "allreduce in backward", "bytegrad", "bytegrad in backward", "int8"],
        ["ddp", "sign", "topk", "powersgd 2", "powersgd 2 in backward", "powersgd 4 in turn in backward"],
    ],
    # Of local steps most blocks have no round: the median is that of a step alone.
    "parameters": [["ddp", "decentralized", "d2", "sgp"], ["ddp", "local_sgd", "diloco int4", "sparse_loco"]],
}
_COUNTED = 4  # steps of a block
# Of Student's distribution, by degrees of freedom: what 95 % lie within.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}

Key = tuple[str, float | None]


def job(
    root: Path, model: str, methods: str, rates: list[float | None], rounds: int, tunings: dict[str, str]
) -> dict[Key, float]:
    """Median seconds per step of each algorithm at each rate, in one job of a checkout; fills `tunings` if they are empty."""
    plan = [(rate, rounds, _COUNTED) for rate in rates]
    settings = {"model": model, "groups": [(group, plan) for group in _GROUPS[methods]], "tunings": tunings}
    told = run(_HOSTS, "steps", settings, root)
    if not tunings:
        tunings.update(told["tunings"])
    seconds: dict[Key, list[float]] = {}
    for row in told["rows"]:
        for name, times in row["times"].items():
            seconds.setdefault((name, row["rate_mbit"]), []).extend(times)
    return {key: statistics.median(times) for key, times in seconds.items()}


def compared(pairs: list[tuple[dict[Key, float], dict[Key, float]]]) -> list[dict[str, Any]]:
    """A row for each algorithm and rate, of (old, new) pairs of jobs."""
    rows = []
    for name, rate in pairs[0][0]:
        logs = [math.log(new[name, rate] / old[name, rate]) for old, new in pairs]
        middle = statistics.fmean(logs)
        half = _T[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        rows.append(
            {
                "name": name,
                "rate_mbit": rate,
                "seconds": [
                    statistics.median(side[name, rate] for side in sides) for sides in zip(*pairs, strict=True)
                ],
                "ratio": math.exp(middle),
                "interval": [math.exp(middle - half), math.exp(middle + half)],
                "pairs": [math.exp(log) for log in logs],
            }
        )
    return rows


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("", "Mbit/s", "old s", "new s", "new / old", "95 %"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        old, new = row["seconds"]
        low, high = row["interval"]
        rate = "no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:g}"
        table.add_row(row["name"], rate, f"{old:.3f}", f"{new:.3f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training.commits", description=__doc__)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--model", default="fc", help="fc or tr")
    parser.add_argument("--methods", default="gradients", choices=sorted(_GROUPS), help="what the algorithms exchange")
    parser.add_argument("--rates", type=rates_of, default="500,none", help="Mbit/s, or none")
    parser.add_argument("--pairs", type=int, default=4, help="jobs of each side, 2 to 10")
    parser.add_argument("--rounds", type=int, default=2, help=f"blocks of {_COUNTED} steps in a job")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.pairs - 1 not in _T:
        parser.error("--pairs must be 2 to 10")
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    console, tunings = Console(width=110), dict[str, str]()
    pairs: list[tuple[dict[Key, float], dict[Key, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(old), options.revision], cwd=_ROOT, check=True)
        try:
            with Progress(console=Console(stderr=True)) as progress:
                # The first job of each side compiles its kernels. The very first one measures links, for all: what an older
                # commit writes a newer one reads.
                task = progress.add_task("jobs", total=2 * options.pairs + 2)
                for number in range(options.pairs + 1):
                    taken = {}
                    for root in (_ROOT, old) if number % 2 else (old, _ROOT):
                        rounds = options.rounds if number else 1
                        taken[root] = job(root, options.model, options.methods, options.rates, rounds, tunings)
                        progress.advance(task)
                    if number:
                        pairs.append((taken[old], taken[_ROOT]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=_ROOT, check=True)
    rows = compared(pairs)
    show(console, rows, f"{options.model}, {_HOSTS} hosts: this working tree against {options.revision}")
    if options.output:
        options.output.write_text(json.dumps({"revision": options.revision, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
