"""Kills ranks one after the other, and measures for how long the others make no step: ours beside torchft's.

python -m bench.goodput.pauses [--kills 12] [--torchft PYTHON] [--output bench/results/pauses.json]

The jobs are those of `bench.goodput`: four processes of this machine, on loopback and with default settings. Each rank is killed
in turn, by SIGKILL, that of rank 0 too. Another one starts 3 s later, and the next one is killed 3 s after its first step. A
pause is the longest time between two steps of any other rank, in the 3 s after the kill. An undisturbed step is part of it. A
rank that makes no step any more counts with all of its time. One whose process has ended by itself does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.goodput.jobs import LIMIT, Job, Rank, job_of
from bench.waiting import until

_SECONDS = 3.0


def pause(ranks: Sequence[Rank], begin: float, end: float) -> float:
    """Returns the longest time between two steps of a rank, of which the second came between two moments."""
    longest = 0.0
    for each in ranks:
        moments = [when for when, _ in each.steps() if when < end]
        between = [after - before for before, after in itertools.pairwise(moments) if after >= begin]
        # What had not ended by then lasted as long, at least.
        longest = max(longest, *between, end - moments[-1])
    return longest


def measure(way: str, spec: str, python: str, kills: int) -> dict[str, Any]:
    """Returns the figures of one entrant."""
    found, ended = list[float](), 0
    with job_of(way, spec, python) as job:
        steps = [after - before for before, after in itertools.pairwise(when for when, _ in job.all[0].steps())]
        for number in range(kills):
            begin = time.time()
            job.kill(number)
            time.sleep(_SECONDS)
            alive = [each for each in job.living if each.process.poll() is None]
            found.append(pause(alive, begin, begin + _SECONDS))
            ended = max(ended, len(job.living) - len(alive))
            _replace(job)
    return {
        "way": way,
        "spec": spec,
        "kills": kills,
        "step_seconds": statistics.median(steps),
        "ended_by_themselves": ended,
        "pause_seconds": {"median": statistics.median(found), "worst": max(found), "all": found},
    }


def _replace(job: Job) -> None:
    job.start()
    new = job.living[-1]
    until(new.steps, LIMIT, lambda: new.output.read_text(errors="replace")[-2000:])
    time.sleep(_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="of each entrant; 12 by default")
    parser.add_argument("--specs", nargs="*", default=["bytegrad", "decentralized", "diloco:interval=10"])
    parser.add_argument(
        "--torchft", default="", help="the Python of an environment that has torchft; else it is left out"
    )
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    entrants = [("ours", spec, sys.executable) for spec in options.specs]
    entrants += [("torchft", "torchft", options.torchft)] if options.torchft else []
    found = []
    print(f"{'':22} {'step, s':>8} {'pause: median, s':>17} {'worst, s':>9}")
    for way, spec, python in entrants:
        one = measure(way, spec, python, options.kills)
        found.append(one)
        times = one["pause_seconds"]
        print(f"{spec:22} {one['step_seconds']:8.3f} {times['median']:17.3f} {times['worst']:9.3f}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
