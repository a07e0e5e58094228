"""What an option costs while nothing happens: `python -m bench.training.surcharge heal|verify [--output FILE]`.

`heal` is `on_failure="heal"` while no rank is lost. `verify` is `verify_every=1`: the difference of two steps is one comparison
of ranks, of which `verify_every=100` has a hundredth in each step. Algorithms with the option and without it take turns in one
job, on emulated hosts as in `bench.training`. A row is one algorithm at one rate. Its ratio is the geometric mean over jobs of
their medians' ratios, with a 95 % interval by Student's t.
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
from bench.ratios import MOST, compared, show
from bench.training.measure import rates_of, run
from bench.training.rivals import HEALS, VERIFIES

_HOSTS = 4
_GROUPS = [["allreduce", "bytegrad", "topk"], ["decentralized", "local_sgd"]]
_COUNTED = 4  # steps of a block
_SUFFIXES = {"heal": HEALS, "verify": VERIFIES}
# Of those that compare ranks in each step: others do once in a round, or have nothing in common.
_VERIFIED = ["allreduce", "bytegrad", "topk"]

Key = tuple[str, float | None]


def job(
    model: str, names: list[str], suffix: str, rates: list[float | None], rounds: int, tunings: dict[str, str]
) -> tuple[dict[Key, float], dict[Key, float]]:
    """Median seconds of a step of each algorithm and rate, without the option and with it; fills `tunings` if they are empty."""
    plan = [(rate, rounds, _COUNTED) for rate in rates]
    chosen = [[name for name in group if name in names] for group in _GROUPS]
    groups = [([*group, *(name + suffix for name in group)], plan) for group in chosen if group]
    told = run(_HOSTS, "steps", {"model": model, "groups": groups, "tunings": tunings})
    if not tunings:
        tunings.update(told["tunings"])
    without, beside = dict[Key, float](), dict[Key, float]()
    for row in told["rows"]:
        for name, times in row["times"].items():
            side = beside if name.endswith(suffix) else without
            side[name.removesuffix(suffix), row["rate_mbit"]] = statistics.median(times)
    return without, beside


def described(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its algorithm and rate apart."""
    name, rate = row["name"]
    return {**row, "name": name, "rate_mbit": rate, "hundredth": (row["ratio"] - 1) / 100}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training.surcharge", description=__doc__)
    parser.add_argument("option", choices=_SUFFIXES, help="what is paid for")
    parser.add_argument("--models", default="fc,tr", type=lambda text: text.split(","), help="of fc and tr")
    every = [name for group in _GROUPS for name in group]
    parser.add_argument(
        "--names", nargs="+", choices=every, help="of algorithms, by default all that the option is for"
    )
    parser.add_argument("--rates", type=rates_of, default="500,none", help="Mbit/s, or none")
    parser.add_argument("--jobs", type=int, default=3, help=f"2 to {MOST}")
    parser.add_argument("--rounds", type=int, default=4, help=f"blocks of {_COUNTED} steps in a job")
    parser.add_argument("--output", type=Path, help="a JSON file; rows that are not measured anew stay")
    options = parser.parse_args()
    names = options.names or (_VERIFIED if options.option == "verify" else every)
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    path, tunings = options.output, dict[str, str]()
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path and path.exists() else {}
    for model in options.models:
        # The first job compiles its kernels, and measures links.
        given = model, names, _SUFFIXES[options.option], options.rates
        job(*given, 1, tunings)
        pairs = [job(*given, options.rounds, tunings) for _ in range(options.jobs)]
        rows = [described(row) for row in compared(pairs)]
        labelled = [{**row, "name": f"{row['name']}, {row['rate_mbit'] or 'no limit'}"} for row in rows]
        show(
            Console(width=110), labelled, f"{model}, {_HOSTS} hosts: without (old) and with {options.option} (new)", 0.0
        )
        new = {(row["name"], row["rate_mbit"]) for row in rows}
        kept = [row for row in found.get(model, []) if (row["name"], row["rate_mbit"]) not in new]
        found[model] = [*kept, *rows]
        if path:
            path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
