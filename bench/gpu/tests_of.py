"""Runs tests of pytest in several processes and collects the outcome of each, also if the run is stopped."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.gpu import marks
from bench.gpu.child import Child

# What the repository's settings of pytest name, and another machine may lack.
PLUGINS = ("pytest_timeout", "pytest_benchmark")
NEEDED = ("pytest", "hypothesis")
# The elements of a report in JUnit's format that a test has unless it passed.
TAGS = {"error": "error", "failure": "failed", "skipped": "skipped"}


def command(tests: Sequence[str], jobs: int, timeout: float, report: Path, more: Sequence[str] = ()) -> list[str]:
    """The command line.

    Raises:
        Refused: pytest or hypothesis is missing.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise marks.Refused(f"no module {name}")
    found = [sys.executable, "-m", "pytest", *tests, "-v", "--tb=short", "-W", "ignore::DeprecationWarning"]
    found += ["-p", "no:cacheprovider", f"--junitxml={report}", *more]
    if find_spec("xdist") and jobs > 1:
        found += ["-n", str(jobs)]
    if find_spec("pytest_timeout"):
        found += ["--timeout", f"{timeout:.0f}"]
    if not all(find_spec(plugin) for plugin in PLUGINS):
        # pytest refuses settings of plugins that it lacks, so that it goes without the repository's settings.
        found += ["-c", os.devnull, "--rootdir", ".", "--import-mode=importlib"]
    return found


def run_tests(
    name: str,
    tests: Sequence[str],
    limit: float,
    report: Path,
    *,
    jobs: int,
    timeout: float,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Counter[str]:
    """Runs tests, passes the output on, and prints figures of those that did not pass.

    Returns:
        The number of tests by outcome. "missing" is 1 if the run was stopped before its end.
    """
    counts: Counter[str] = Counter()
    failed: list[str] = []

    def take(line: str) -> None:
        print(line, flush=True)
        # With xdist: "[gw0] [ 50%] PASSED tests/…"; without: "tests/… PASSED [ 50%]".
        words = line.split()
        for word in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            if word in words and any("::" in each for each in words) and not line.startswith((word, "=", "_")):
                counts[word.lower()] += 1
                if word in ("FAILED", "ERROR"):
                    failed.append(next(each for each in words if "::" in each).rsplit("/", 1)[-1])
                marks.figures({name: {**counts, "failed tests": failed[:60]}})

    settings = {"NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0", **(environment or {})}
    child = Child(command(tests, jobs, timeout, report, more), take, limit, settings, own_group=False)
    while not child.poll():
        child.wait_a_moment()
    by_report = outcomes(report)
    marks.figures({name: {**(by_report or counts), "failed tests": failed[:60], "seconds": round(child.seconds, 1)}})
    result = Counter(by_report or counts)
    # 5: no test was collected.
    if child.timed_out or child.status not in (0, 1, 5):
        result["missing"] = 1
    for test in failed[:10]:
        marks.row(f"{name}: failed: {test}")
    return result


def outcomes(report: Path) -> Counter[str]:
    """The number of tests by outcome, from a report in JUnit's format; empty if there is none."""
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return Counter()
    counts: Counter[str] = Counter()
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((name for tag, name in TAGS.items() if tag in kinds), "passed")
        counts[outcome] += 1
    return counts


def verdict(results: Mapping[str, Counter[str]]) -> None:
    """Prints the headline, and raises if a test failed, a run broke off, or nothing ran."""
    parts = []
    for name, counts in results.items():
        shown = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        parts.append(f"{name}: {shown or 'no test'}")
    marks.headline("; ".join(parts))
    bad = [name for name, counts in results.items() if counts["failed"] or counts["error"] or counts["missing"]]
    if bad:
        raise marks.Differs(f"tests of {', '.join(bad)}")
    if not any(counts["passed"] for counts in results.values()):
        raise marks.Refused("every test was skipped")
