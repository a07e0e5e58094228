"""Runs pytest several times for one tier of tests: `python -m tests.runs test` is what `make test` does.

Every run of a tier takes place, also after one that failed, and the exit status is the worst of theirs. With `--minutes` the
runs share a time: each gets its share of what is left when it begins, so that what one does not use goes to the next ones.
`tests/deadline.py` describes which items begin before the end of a run.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests import reach

ROOT = Path(__file__).parents[1]
# Kernels for GPUs run in Triton's interpreter and Numba's simulator: each once, and with `--all` by the tests of the others.
EMULATED = ("tests/emulated",)
EMULATED_ALL = ("tests/emulated", "tests/compression", "tests/docs", "tests/launchers")
INTERPRETER = {"TRITON_INTERPRET": "1"}
SIMULATOR = {"NUMBA_ENABLE_CUDASIM": "1"}
# What compiles Triton's kernels for a GPU.
LAUNCHES = (
    "tests/launch_path",
    *(f"tests/ahead_of_time/test_{name}.py" for name in ("triton", "ptx", "select", "chunks")),
)
OVERLAY = ROOT / ".overlay"
# Pytest's exit status of a run that has no item.
NO_ITEMS = 5
# What `make test` leaves out; hypothesis draws more examples with `--all`.
REST = "(slow or beyond or hypothesis)"
# Minutes of a sample of the rest of the tests, and those after a change of what chooses it.
MINUTES, MINUTES_OF_NEW_RULES = 25.0, 50.0


@dataclass(frozen=True)
class Run:
    """One run of pytest.

    Attributes:
        name: what is printed before it.
        paths: the folders and files of its tests.
        workers: the number of processes; None for the number of the command line.
        expression: pytest's `-m`, which chooses items by their markers; empty for all.
        environment: variables that it sets.
        share: the part of the time that it gets, beside the shares of the other runs.
    """

    name: str
    paths: tuple[str, ...]
    workers: int | None = None
    expression: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0


def runs_of(tier: str) -> list[Run]:
    """Returns the runs of a tier.

    Args:
        tier: the name of the target of `make`.
    """
    if tier == "test-overlay":
        path = os.pathsep.join(filter(None, [str(OVERLAY / "triton"), os.environ.get("PYTHONPATH", "")]))
        return [
            Run("Triton of the overlay", LAUNCHES, 2, environment={"PYTHONPATH": path}),
            Run("CuPy of the overlay", ("tests/comm/backends/nccl/test_real_nccl.py",), 0),
        ]
    rest = f" and {REST}" if tier == "test-rest" else ""
    # No rank waits in the emulators, so that a worker per core is enough. `make test` runs nothing of the other folders in them.
    paths = EMULATED if tier == "test" else EMULATED_ALL
    emulated = [
        Run("Triton's interpreter", paths, 2, "not processes", INTERPRETER, share=0.1),
        Run("Numba's simulator", paths, 2, "not processes", SIMULATOR, share=0.1),
    ]
    if tier == "test":
        return [Run("all", ("tests",), share=0.8), *emulated]
    # The long tests of processes have limits of time, and the others keep both cores busy.
    return [
        Run("without processes", ("tests",), expression=f"not processes{rest}", share=0.55),
        Run("processes", ("tests",), expression=f"processes{rest}", share=0.25),
        *emulated,
    ]


def only(runs: Iterable[Run], files: Iterable[str]) -> list[Run]:
    """Returns runs with only some files of their tests; those without such files are left out.

    Args:
        runs: the runs, with folders and files as their paths.
        files: names of files of tests.
    """
    found = []
    for run in runs:
        folders = [Path(path) for path in run.paths]
        paths = tuple(name for name in files if any(folder in (Path(name), *Path(name).parents) for folder in folders))
        if paths:
            found.append(replace(run, paths=paths))
    return found


def first_end(shares: Sequence[float], now: float, limit: float) -> float:
    """Returns the time at which the first of some runs ends, if it gets its share of the time until a limit."""
    return now + max(0.0, limit - now) * shares[0] / math.fsum(shares)


def worst(runs: Sequence[Run], call: Callable[[Run, float | None], int], limit: float | None = None) -> int:
    """Calls a function for each run, in order, and returns the worst exit status: the largest.

    Args:
        runs: the runs.
        call: starts one, which ends at a time, or has no end if that is None; returns its exit status.
        limit: seconds since 1970 at which all runs end.
    """
    statuses = [0]
    for number, run in enumerate(runs):
        shares = [each.share for each in runs[number:]]
        statuses.append(call(run, None if limit is None else first_end(shares, time.time(), limit)))
    return max(statuses)


def command(run: Run, workers: int, options: Sequence[str]) -> list[str]:
    """Returns the command line of a run."""
    return [
        *(sys.executable, "-m", "pytest", *run.paths, "-n", str(workers if run.workers is None else run.workers)),
        *("--dist", "worksteal", "--durations=20", "--durations-min=2"),
        *(("-m", run.expression) if run.expression else ()),
        *options,
    ]


def status_of(returncode: int) -> int:
    """Returns the exit status of a process as a shell does, for which a signal is a number above 128."""
    return 128 - returncode if returncode < 0 else returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a tier; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tier", choices=("test", "test-all", "test-rest", "test-overlay"))
    parser.add_argument("--workers", type=int, default=3, help="processes of a run whose ranks wait for each other")
    parser.add_argument("--reached", action="store_true", help="only files of tests that the last changes reach")
    parser.add_argument("--minutes", type=float, help="minutes after which no item begins")
    parser.add_argument("--seed", metavar="HEX", help="the order of items, of which a run that ends early has a sample")
    parser.add_argument(
        "--sample", action="store_true", help="--reached, with the --minutes and --seed of the last commit"
    )
    parser.add_argument("--end", metavar="TIME", type=float, help="seconds since 1970 after which nothing begins")
    given = parser.parse_args(arguments)
    chosen, minutes, seed, few = runs_of(given.tier), given.minutes, given.seed, False
    if given.reached or given.sample:
        reached = reach.of_last_changes(ROOT)
        print(reach.described(reached), flush=True)
        few = not reached.everything
        if few:
            chosen = only(chosen, sorted(reached.files))
        if given.sample:
            seed = seed or reached.change.head or "0"
            minutes = minutes or (MINUTES_OF_NEW_RULES if reached.new_rules else MINUTES)
    options = [*(["--all"] if given.tier in ("test-all", "test-rest") else []), *(["--seed", seed] if seed else [])]
    if given.end is not None:
        options += ["--end", f"{given.end:.0f}"]
    limits = [time.time() + 60 * minutes] if minutes is not None else []
    limits += [given.end] if given.end is not None else []

    def call(run: Run, until: float | None) -> int:
        print(f"\n{given.tier}: {run.name}", flush=True)
        line = command(run, given.workers, [*options, *(["--until", f"{until:.0f}"] if until is not None else [])])
        environment = {**os.environ, **run.environment}
        status = status_of(subprocess.run(line, cwd=ROOT, env=environment, check=False).returncode)
        # Of the files that a change reaches, none need have an item of the run.
        return 0 if status == NO_ITEMS and few else status

    return worst(chosen, call, min(limits, default=None))


if __name__ == "__main__":
    sys.exit(main())
