"""The working tree against another commit: `python -m bench.against REVISION [--suites fc kernels] [--output FILE]`.

Whole jobs of both take turns, each time in the other order, so that a machine that becomes slower does so for both. Each runs the
benches of its own checkout. A ratio is the geometric mean over pairs of jobs, with a 95 % interval by Student's t. A row is
"slower" if the whole interval is more than 3 % above 1. Rows that one of both does not have are left out, and listed.

First come the tests that the difference reaches: times of a tree whose tests fail are worth nothing, so that this command ends
there. `--tests all` runs all of `make test`, and `--tests none` is for a tree whose tests have just passed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.against.suites import SUITES, Job, Suite
from bench.netlab import lab as netlab
from bench.ratios import MOST, compared, show, verdict
from tests import reach

ROOT = Path(__file__).resolve().parents[2]
BAR = 0.03  # beyond which a row is slower, or faster


def tests_of(revision: str, wanted: str) -> list[str]:
    """The command that runs the tests of the working tree; empty for none.

    Raises:
        reach.Unknown: there is no such revision.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    if wanted == "none":
        return []
    if wanted == "all":
        return [sys.executable, "-m", "tests.runs", "test"]
    base = reach.commit_of(ROOT, revision)
    names = reach.git(ROOT, "diff", "--name-only", base).splitlines()
    names += reach.git(ROOT, "ls-files", "--others", "--exclude-standard").splitlines()
    found = reach.reached_by(reach.Change("working tree", base, files=tuple(names)))
    if found.everything:
        return [*command, "tests"]
    return [*command, *sorted(found.files)] if found.files else []


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(old), revision], cwd=ROOT, check=True)
        try:
            yield old
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)


def pairs_of(suite: Suite, old: Path, count: int, rounds: int, progress: Progress) -> list[tuple[Job, Job]]:
    """(old, new) pairs of jobs; the first one of each side, which compiles, is not counted."""
    task, memory = progress.add_task(suite.name, total=2 * (count + 1)), dict[str, Any]()
    pairs = []
    for number in range(count + 1):
        memory["rounds"] = rounds if number else 1
        taken = {}
        for root in (ROOT, old) if number % 2 else (old, ROOT):
            taken[root] = suite.job(root, memory)
            progress.advance(task)
        if number:
            pairs.append((taken[old], taken[ROOT]))
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", help="the commit to compare with")
    about = "; ".join(f"{suite.name}: {suite.about}" for suite in SUITES.values())
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES), help=f"{about}; all by default")
    parser.add_argument("--pairs", type=int, default=4, help=f"jobs of each side, 2 to {MOST}")
    parser.add_argument("--rounds", type=int, default=2, help="blocks of a job")
    parser.add_argument("--tests", choices=("reached", "all", "none"), default="reached", help="those that come first")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    if not 2 <= options.pairs <= MOST:
        parser.error(f"--pairs must be 2 to {MOST}")
    suites = [SUITES[name] for name in options.suites]
    if any(suite.needs_lab for suite in suites) and (reason := netlab.available()):
        print(
            f"{reason}; --suites {' '.join(s.name for s in SUITES.values() if not s.needs_lab)} need none",
            file=sys.stderr,
        )
        return 1
    try:
        command = tests_of(options.revision, options.tests)
    except reach.Unknown as error:
        parser.error(str(error))
    if command and subprocess.run(command, cwd=ROOT, check=False).returncode:
        print("tests fail in this working tree, so that nothing is measured: mend them first", file=sys.stderr)
        return 1
    console, results, slower = Console(width=130), dict[str, Any](), 0
    with checkout(options.revision) as old, Progress(console=Console(stderr=True)) as progress:
        for suite in suites:
            pairs = pairs_of(suite, old, options.pairs, options.rounds, progress)
            rows = compared(pairs)
            show(console, rows, f"{suite.about}: this working tree against {options.revision}", BAR)
            alone = sorted({*pairs[0][0]} ^ {*pairs[0][1]})
            if alone:
                console.print(f"measured on one side only: {', '.join(alone)}", highlight=False)
            slower += sum(verdict(row, BAR) == "slower" for row in rows)
            results[suite.name] = rows
            if options.output:
                options.output.write_text(
                    json.dumps({"revision": options.revision, "suites": results}, indent=1) + "\n"
                )
    console.print(f"{slower} rows are slower" if slower else "no row is slower", highlight=False)
    return 0
