"""Gives a job faults at random moments, and prints what became of them.

python -m bagua_kernels.comm.chaos [--seed 0] [--kinds kill stop] [--every 30] [--most 10] --ranks 4 -- torchrun … train.py

The program calls `comm.init` and wraps its model with an algorithm; it is not changed. Moments and ranks come from the seed, so
that a run can be repeated. Faults of ranks that are not there at their moment do not happen.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_kernels import knobs
from bagua_kernels.comm.faults.fault import KINDS, Fault


@dataclass(frozen=True)
class Happening:
    """What became of a fault.

    Attributes:
        fault: that was planned.
        happened: True if its rank was there.
        seconds: until others were a step further than any rank was before; None if they never were.
    """

    fault: Fault
    happened: bool
    seconds: float | None


def plan(seed: int, ranks: int, kinds: Sequence[str], every: float, most: int, seconds: float) -> list[Fault]:
    """Returns faults at moments of the job.

    Args:
        seed: of the random numbers.
        ranks: how many there are.
        kinds: of `KINDS`, among which one is drawn for each fault.
        every: the mean time between two faults, in seconds.
        most: how many faults.
        seconds: how long stops and cuts last.
    """
    numbers, moment, found = random.Random(seed), 0.0, list[Fault]()
    for _ in range(most):
        moment += every * numbers.uniform(0.5, 1.5)
        kind = numbers.choice(kinds)
        found.append(Fault(kind, numbers.randrange(ranks), at=round(moment, 3), seconds=seconds))
    return found


def happenings(faults: Sequence[Fault], folder: Path) -> list[Happening]:
    """Returns what became of faults, by what the ranks have noted in a folder."""
    steps, happened = list[tuple[float, int, int]](), list[tuple[float, str]]()
    for path in folder.glob("*.jsonl"):
        rank = -1
        for line in path.read_text().splitlines():
            note = json.loads(line)
            rank = note.get("rank", rank)
            if "step" in note:
                steps.append((note["time"], note["step"], rank))
            elif "fault" in note:
                happened.append((note["time"], note["fault"]))
    found = []
    for fault in faults:
        moment = next((when for when, text in happened if text == str(fault)), None)
        if moment is None:
            found.append(Happening(fault, False, None))
            continue
        before = max((step for when, step, _ in steps if when <= moment), default=-1)
        after = [when for when, step, rank in steps if when > moment and step > before and rank != fault.rank]
        found.append(Happening(fault, True, min(after) - moment if after else None))
    return found


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command with faults, and returns its exit status.

    Args:
        words: of the command line.
        environment: that the command gets, and variables more.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bagua_kernels.comm.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of moments and ranks; 0 by default")
    parser.add_argument("--ranks", type=int, required=True, help="among which faults are drawn")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["kill"], help="kill by default")
    parser.add_argument("--every", type=float, default=30.0, help="mean seconds between two faults; 30 by default")
    parser.add_argument("--most", type=int, default=10, help="faults; 10 by default")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long stops and cuts last; 5 by default")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(words)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("expected a command after --, such as torchrun --nproc-per-node 4 train.py")
    if options.ranks < 1 or options.every <= 0 or options.most < 0 or options.seconds < 0:
        parser.error("expected at least one rank, and times that are not negative")
    faults = plan(options.seed, options.ranks, options.kinds, options.every, options.most, options.seconds)
    with tempfile.TemporaryDirectory(prefix="bagua_kernels_faults_") as folder:
        given = {knobs.FAULTS.variable: ";".join(map(str, faults)), knobs.FAULTS_FOLDER.variable: folder}
        status = subprocess.run(command, env={**environment, **given}, check=False).returncode
        found = happenings(faults, Path(folder))
    print(f"seed {options.seed}: {sum(each.happened for each in found)} of {len(found)} faults happened")
    print(f"{'at, s':>8}  {'fault':8} {'rank':>4}  others a step further after, s")
    for each in found:
        after = "never" if each.seconds is None else f"{each.seconds:.2f}"
        became = after if each.happened else "its rank was not there"
        print(f"{each.fault.at:8.1f}  {each.fault.kind:8} {each.fault.rank:4}  {became}")
    print(f"the command ended with the status {status}")
    return status if status >= 0 else 128 - status
