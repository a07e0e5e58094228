"""What `on_failure="heal"` costs while no rank is lost: `python -m bench.training.healing [--output FILE]`.

Algorithms with it and without it take turns in one job, on emulated hosts as in `bench.training`. A row is one algorithm at
one rate. Its ratio is the geometric mean over jobs of their medians' ratios, with a 95 % interval by Student's t.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.netlab import lab as netlab
from bench.training.commits import Key, compared, show
from bench.training.measure import rates_of, run
from bench.training.rivals import HEALS

_HOSTS = 4
_GROUPS = [["allreduce", "bytegrad", "topk"], ["decentralized", "local_sgd"]]
_COUNTED = 4  # steps of a block


def job(
    model: str, names: list[str], rates: list[float | None], rounds: int, tunings: dict[str, str]
) -> tuple[dict[Key, float], dict[Key, float]]:
    """Median seconds of a step of each algorithm at each rate, without healing and with it; fills `tunings` if they are empty."""
    plan = [(rate, rounds, _COUNTED) for rate in rates]
    chosen = [[name for name in group if name in names] for group in _GROUPS]
    groups = [([*group, *(name + HEALS for name in group)], plan) for group in chosen if group]
    told = run(_HOSTS, "steps", {"model": model, "groups": groups, "tunings": tunings})
    if not tunings:
        tunings.update(told["tunings"])
    raising, healing = dict[Key, float](), dict[Key, float]()
    for row in told["rows"]:
        for name, times in row["times"].items():
            side = healing if name.endswith(HEALS) else raising
            side[name.removesuffix(HEALS), row["rate_mbit"]] = statistics.median(times)
    return raising, healing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training.healing", description=__doc__)
    parser.add_argument("--models", default="fc,tr", type=lambda text: text.split(","), help="of fc and tr")
    every = [name for group in _GROUPS for name in group]
    parser.add_argument("--names", nargs="+", choices=every, default=every, help="of algorithms")
    parser.add_argument("--rates", type=rates_of, default="500,none", help="Mbit/s, or none")
    parser.add_argument("--jobs", type=int, default=3, help="2 to 10")
    parser.add_argument("--rounds", type=int, default=4, help=f"blocks of {_COUNTED} steps in a job")
    parser.add_argument("--output", type=Path, help="a JSON file; rows that are not measured anew stay")
    options = parser.parse_args()
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    path, tunings = options.output, dict[str, str]()
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path and path.exists() else {}
    for model in options.models:
        # The first job compiles its kernels, and measures links.
        job(model, options.names, options.rates, 1, tunings)
        pairs = [job(model, options.names, options.rates, options.rounds, tunings) for _ in range(options.jobs)]
        rows = compared(pairs)
        show(Console(width=110), rows, f"{model}, {_HOSTS} hosts: raise (old) and heal (new)")
        new = {(row["name"], row["rate_mbit"]) for row in rows}
        kept = [row for row in found.get(model, []) if (row["name"], row["rate_mbit"]) not in new]
        found[model] = [*kept, *rows]
        if path:
            path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
