"""Programs with DDP as their users have them, and the same programs with an algorithm: `make adoption`.

Each runs twice, on two ranks. A row has the lines that change, and seconds from the command to the end of the first step. It has
the bytes of a step, and whether ranks have equal bits after all steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from bench.adoption.edits import EDITS, MOST_LINES, changed_lines, program

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds of a program
# DDP's processes sometimes abort in the end of the interpreter, after their last line ("terminate called without an active
# exception" of torch 2.13 with Gloo).
TRIES = 3


def run(name: str, text: str) -> dict[str, Any]:
    """Runs a program in a folder of its own, and returns what its steps were."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.py").write_text(text)
        steps = Path(folder) / "steps"
        steps.mkdir()
        watch = str(Path(__file__).parent / "watch")
        environment = {
            **os.environ,
            "ADOPTION_STEPS": str(steps),
            "PYTHONPATH": os.pathsep.join([watch, str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            # Ray starts its processes slowly where there are two cores.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
            # torchrun's agent keeps one store for all attempts, in which Gloo then finds addresses of processes that have ended.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [sys.executable, *EDITS[name].launcher, f"{name}.py"]
        began = time.time()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        seconds = time.time() - began
        if done.returncode:
            output = f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
            raise RuntimeError(f"{name} has ended with {done.returncode} after {seconds:.0f} s:\n{output}")
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(steps.glob("*.jsonl"))]
    found = summary(lines)
    return {**found, "first_step_seconds": round(found.pop("first") - began, 2), "seconds": round(seconds, 2)}


def summary(processes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns what was found of all processes that took steps."""
    # One process less in an attempt that was given up may have taken a step less.
    attempts: dict[str, list[list[dict[str, Any]]]] = {}
    for steps in processes:
        attempts.setdefault(steps[0]["attempt"], []).append(steps)
    equal, common = True, 0
    for ranks in attempts.values():
        if sorted(steps[0]["rank"] for steps in ranks) != [0, 1]:
            raise RuntimeError(f"expected steps of ranks 0 and 1, found {[steps[0]['rank'] for steps in ranks]}")
        for pair in zip(*ranks, strict=False):
            equal = equal and len({each["bits"] for each in pair}) == 1
            common += 1
    first = attempts[min(attempts)]
    sent = [steps[-1]["sent"] for steps in first]
    of_step = None
    if all(each is not None for each in sent):
        # What was sent until the first step has ended contains the start.
        of_step = max((steps[-1]["sent"] - steps[0]["sent"]) / (len(steps) - 1) for steps in first)
    return {
        "first": min(steps[0]["at"] for steps in first),
        "steps": common,
        "attempts": len(attempts),
        "equal_bits": equal,
        "elements": first[0][0]["elements"],
        "bytes_per_step": of_step,
    }


def is_adopted(row: dict[str, Any]) -> bool:
    """True if few lines change, ranks agree, and at most half of DDP's bytes are sent, which are 4 per element with two ranks."""
    after = row["after"]
    return bool(
        row["lines"] <= MOST_LINES
        and after["equal_bits"]
        and after["attempts"] == 1 + EDITS[row["name"]].restarts
        and after["bytes_per_step"] is not None
        and 0 < after["bytes_per_step"] <= 2 * after["elements"]
    )


def measure(name: str) -> dict[str, Any]:
    """Returns the row of a program."""
    before, after = program(name)
    aborted = 0
    while True:
        try:
            found = run(name, before)
            break
        except RuntimeError:
            aborted += 1
            if aborted == TRIES:
                raise
    row = {
        "name": name,
        "title": EDITS[name].title,
        "lines": changed_lines(before, after),
        "program": hashlib.sha256(after.encode()).hexdigest()[:16],
        "before": {**found, "failed_runs": aborted},
        "after": run(name, after),
    }
    return {**row, "adopted": is_adopted(row)}


def show(rows: list[dict[str, Any]], console: rich.console.Console) -> None:
    """Prints the table."""
    table = rich.table.Table("program", "lines", "first step, s", "DDP, s", "bytes / element", "equal bits", "adopted")
    for row in rows:
        after = row["after"]
        table.add_row(
            row["title"],
            str(row["lines"]),
            f"{after['first_step_seconds']:.1f}",
            f"{row['before']['first_step_seconds']:.1f}",
            "-" if after["bytes_per_step"] is None else f"{after['bytes_per_step'] / after['elements']:.2f}",
            str(after["equal_bits"]),
            str(row["adopted"]),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EDITS)}; all by default")
    parser.add_argument("--output", type=Path, help="file of JSON; rows of other programs stay in it")
    options = parser.parse_args()
    console = rich.console.Console()
    rows = {}
    if options.output and options.output.exists():
        rows = {row["name"]: row for row in json.loads(options.output.read_text())["programs"]}
    for name in options.names or EDITS:
        rows[name] = measure(name)
        console.print(f"{name}: {rows[name]}")
    ordered = [rows[name] for name in EDITS if name in rows]
    show(ordered, console)
    if options.output:
        options.output.write_text(json.dumps({"programs": ordered}, indent=1) + "\n")
    return 0 if all(row["adopted"] for row in ordered) else 1


if __name__ == "__main__":
    sys.exit(main())
