"""One group of cases, compared with the CPU's digests: what the processes of several stages do."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterable

from bench.gpu import digests, marks
from bench.gpu.cases import Case
from bench.gpu.stage import Context
from bench.gpu.workers import Worker, judge, run_workers

# Seconds between two lines about what was compared so far.
INTERVAL = 2.0
# Differences that are printed, and raised errors after which a group is given up.
MOST_SHOWN = 40
MOST_ERRORS = 20


def compare(group: str, chosen: Iterable[Case], context: Context) -> None:
    """Runs cases, each for itself, so that a failure hides no other.

    Raises:
        Differs: a result is not the CPU's, or a case raised an error.
    """
    device = context.place
    known = digests.of_group(group)
    counts: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    first_error = first_difference = ""
    told = time.monotonic()

    def tell() -> None:
        marks.figures({"equal": counts["equal"], "of": counts["of"], "differ": dict(wrong), "errors": counts["errors"]})

    for case in chosen:
        expected = known.get(case.name)
        if expected is None or len(expected) != len(case.operations):
            raise AssertionError(f"{group}, {case.name}: not in the digests; run `make gpu-digests`")
        counts["of"] += len(case.operations)
        try:
            found = case.digests(device)
        except Exception as error:
            counts["errors"] += 1
            wrong["raises"] += 1
            if counts["errors"] <= 3:
                traceback.print_exc()
            first_error = first_error or f"{case.name}: {type(error).__name__}: {error}"
            # After such an error of CUDA every later call fails, too.
            if counts["errors"] >= MOST_ERRORS or "CUDA error" in str(error) or "illegal memory" in str(error):
                tell()
                break
            continue
        differing = [name for name, a, b in zip(case.operations, found, expected, strict=True) if a != b]
        counts["equal"] += len(case.operations) - len(differing)
        wrong.update(differing)
        if differing and not context.fake:
            first_difference = first_difference or f"{case.name}: {', '.join(differing)}"
            counts["shown"] += 1
            if counts["shown"] <= MOST_SHOWN:
                print(f"{case.name}: differ: {', '.join(differing)}", flush=True)
        if time.monotonic() - told > INTERVAL:
            told = time.monotonic()
            tell()
    tell()
    if counts["errors"] or (counts["equal"] < counts["of"] and not context.fake):
        reason = first_error or first_difference
        raise marks.Differs(f"{counts['equal']} of {counts['of']} equal; first: {reason}"[:600])


def run_groups(
    stage: str, groups: Iterable[str], context: Context, jobs: int | None, environment: dict[str, str] | None = None
) -> None:
    """A process per group.

    Raises:
        Differs: one of them failed.
    """

    def tell(workers: dict[str, Worker]) -> None:
        equal, of = (sum(worker.figures.get(key, 0) for worker in workers.values()) for key in ("equal", "of"))
        over = sum(worker.status is not None for worker in workers.values())
        marks.headline(f"{equal:,} of {of:,} results equal the CPU, {over} of {len(workers)} groups complete")

    commands = {group: context.command(stage, group) for group in groups}
    own = {group: environment or {} for group in commands}
    judge(run_workers(commands, context.left - 3.0, jobs, own, tell))
