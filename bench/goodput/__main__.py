"""Kills a rank each minute and starts another one 20 s later; measures what is left of the training.

python -m bench.goodput [--minutes 3] [--torchft PYTHON] [--output bench/results/goodput.json]

Four processes of this machine train a network of 0.3 M parameters, on loopback and with default settings. Each rank is killed in
turn, by SIGKILL, 20 s after the beginning of a minute. Goodput is the number of steps of all ranks that count, over

    (steps of all ranks in a second, undisturbed) x (seconds) x (the share of ranks that live).

- our algorithms, with `on_failure="heal"`: a killed rank's successor joins.
- torchft, in an environment of its own whose Python is given: likewise. Its lighthouse has the options of its example.
- torchrun with DDP, which starts all ranks again at once, from a checkpoint of each 10 s. No rank is away for 20 s there, since
  one machine has all: so its share is 1. Steps that are made again do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.goodput.jobs import job_of

_MINUTE, _KILL_AT, _BACK_AT = 60.0, 20.0, 40.0  # seconds
_QUIET = 30.0  # seconds of the undisturbed run


def measure(way: str, spec: str, python: str, minutes: int) -> dict[str, Any]:
    """Returns the figures of one entrant."""
    with job_of(way, spec, python) as job:
        begin = time.time()
        time.sleep(_QUIET)
        rate = job.useful(begin, begin + _QUIET) / _QUIET
    with job_of(way, spec, python) as job:
        begin = time.time()
        for minute in range(minutes):
            for moment, act in ((_KILL_AT, lambda: job.kill(minute)), (_BACK_AT, job.start)):  # noqa: B023
                time.sleep(max(0.0, begin + minute * _MINUTE + moment - time.time()))
                act()
        end = begin + minutes * _MINUTE
        time.sleep(max(0.0, end - time.time()))
        steps, share = job.useful(begin, end), job.lived(begin, end)
    return {
        "way": way,
        "spec": spec,
        "minutes": minutes,
        "undisturbed_steps_per_second": rate,
        "steps": steps,
        "living_share": share,
        "goodput": steps / (rate * (end - begin) * share),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=3, help="of each entrant, with a failure each; 3 by default")
    parser.add_argument("--specs", nargs="*", default=["bytegrad", "decentralized", "diloco:interval=10"])
    parser.add_argument(
        "--torchft", default="", help="the Python of an environment that has torchft; else it is left out"
    )
    parser.add_argument("--without-torchrun", action="store_true", help="leaves torchrun out")
    parser.add_argument("--output", type=Path, help="a JSON file; rows that are not measured anew stay")
    options = parser.parse_args(arguments)
    entrants = [("ours", spec, sys.executable) for spec in options.specs]
    entrants += [("torchft", "torchft", options.torchft)] if options.torchft else []
    entrants += [] if options.without_torchrun else [("torchrun", "torchrun, DDP", sys.executable)]
    rows = json.loads(options.output.read_text()) if options.output is not None and options.output.exists() else []
    found = {(row["way"], row["spec"]): row for row in rows}
    print(f"{'':22} {'steps/s undisturbed':>20} {'living share':>13} {'goodput':>8}")
    for way, spec, python in entrants:
        one = measure(way, spec, python, options.minutes)
        found[way, spec] = one
        print(
            f"{spec:22} {one['undisturbed_steps_per_second']:20.1f} {one['living_share']:13.3f} {one['goodput']:8.3f}",
            flush=True,
        )
        if options.output is not None:
            options.output.write_text(json.dumps([*found.values()], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
