"""Runs stages, each in a process group of its own, so that a crash or a hang costs one stage only.

A stage prints lines of its own and marked lines (`bench.gpu.marks`). The runner reads them while the stage runs, so that figures
stay when the stage is killed.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bench.gpu import marks
from bench.gpu.child import Child

PASSED, FAILED, REFUSED, TIMED_OUT, CRASHED, NOT_RUN = (
    "passed",
    "failed",
    "refused",
    "timed out",
    "crashed",
    "not run",
)
BAD = (FAILED, TIMED_OUT, CRASHED)
# Lines of a stage that are kept at its end, however many came before, and bytes that are written as they come.
LAST_LINES = 200
FIRST_BYTES = 400_000
# Seconds between two looks at the stages under way.
INTERVAL = 0.05
# The variable that holds a stage's own limit in seconds.
LIMIT = "BAGUA_KERNELS_GPU_LIMIT"
ROWS_OF_TABLE = 60


@dataclass(frozen=True)
class Stage:
    """What a stage is, and what it needs.

    Attributes:
        name: its name.
        command: its command line.
        limit: seconds after which its process group is killed.
        cores: processor cores that it keeps busy. Stages run at once as long as there are enough.
        alone: True if nothing may run beside it.
        least: seconds without which it is not started.
        environment: variables in addition to those that all stages share.
        rows: lines of the last table that it may take.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    cores: int = 1
    alone: bool = False
    least: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: int = 4


@dataclass
class Report:
    """What a stage left behind.

    Attributes:
        stage: the stage.
        outcome: one of the words at the top of this file; empty while it runs.
        seconds: how long it took.
        status: the exit status, or the negative number of a signal; None if it was not started.
        headline: its result in a few words.
        reason: why it did not pass.
        figures: what it measured, by name.
        table: lines for the last table.
        last: the last lines of its output.
        lines: the number of lines of its output.
    """

    stage: Stage
    outcome: str = ""
    seconds: float = 0.0
    status: int | None = None
    headline: str = ""
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    table: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    lines: int = 0

    def take(self, line: str) -> None:
        """Counts a line of output, and keeps what a marked line holds."""
        self.lines += 1
        self.last.append(line)
        kind, value = marks.parsed(line)
        match kind:
            case marks.FIGURE:
                self.figures.update(value)
            case marks.ROW:
                self.table.append(value)
            case marks.HEADLINE:
                self.headline = value
            case marks.FAILED | marks.REFUSED:
                self.reason = value

    def end(self, child: Child) -> None:
        """Sets the outcome by how the process ended."""
        self.seconds, self.status = child.seconds, child.status
        if child.timed_out:
            self.outcome, self.reason = TIMED_OUT, f"killed after its limit of {child.limit:.0f} s"
        elif child.status == 0:
            self.outcome = PASSED
        elif child.status == marks.REFUSED_STATUS:
            self.outcome = REFUSED
        elif child.status is not None and child.status < 0:
            self.outcome, self.reason = CRASHED, f"ended by signal {-child.status}"
        else:
            self.outcome = FAILED
            self.reason = self.reason or next((line for line in reversed(self.last) if line.strip()), "no output")

    def line(self) -> str:
        """The report as one line of JSON, with the end of the output unless the stage passed."""
        told = {
            "stage": self.stage.name,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 2),
            "limit": self.stage.limit,
            "status": self.status,
            "headline": self.headline,
            "reason": self.reason,
            "figures": self.figures,
            "rows": self.table,
            "lines": self.lines,
        }
        if self.outcome in BAD:
            told["last"] = list(self.last)[-30:]
        return json.dumps(told)

    @property
    def summary(self) -> str:
        """What the last table has beside the outcome."""
        return "; ".join(filter(None, (self.headline, self.reason)))


class Log:
    """One file for the output of all stages; each line has the name of its stage before it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._left_out: dict[str, deque[str]] = {}
        self._number: dict[str, int] = {}

    def write(self, stage: str, line: str) -> None:
        """Writes a line at once, or keeps it for `end` if the stage has written a lot already."""
        with self._lock:
            if self._bytes.get(stage, 0) > FIRST_BYTES:
                self._left_out.setdefault(stage, deque(maxlen=LAST_LINES)).append(line)
                self._number[stage] = self._number.get(stage, 0) + 1
                return
            self._bytes[stage] = self._bytes.get(stage, 0) + len(line) + 1
            self._put(stage, line)

    def end(self, stage: str) -> None:
        """Writes the last lines of a stage that has written a lot."""
        with self._lock:
            kept = self._left_out.pop(stage, deque())
            if (missing := self._number.get(stage, 0) - len(kept)) > 0:
                self._put(stage, f"… {missing} lines are left out …")
            for line in kept:
                self._put(stage, line)

    def _put(self, stage: str, line: str) -> None:
        self._file.write(f"{stage:>12} | {line}\n")
        self._file.flush()


class Runner:
    """Runs stages in their order, several at once where there are cores for them.

    Attributes:
        reports: one per stage, in the order of the stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        log: Path,
        summary: Path,
        deadline: float,
        environment: Mapping[str, str] | None = None,
        cores: int | None = None,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        """Creates the files' folder.

        Args:
            stages: in the order in which they are to start.
            log: the file for all output; replaced.
            summary: the file to which a line of JSON is appended as soon as a stage ends.
            deadline: seconds for all stages together. A stage that does not fit into the rest is not run.
            environment: variables that all stages share.
            cores: processor cores; those of this process by default.
            say: prints a line of progress.
        """
        self.reports = [Report(stage) for stage in stages]
        self._log_path, self._summary = log, summary
        self._environment = dict(environment or {})
        self._cores = cores or len(os.sched_getaffinity(0))
        self._say = say
        self._deadline = deadline
        self._running: dict[str, tuple[Report, Child]] = {}
        for path in (log, summary):
            path.parent.mkdir(parents=True, exist_ok=True)

    def run(self) -> list[Report]:
        """Runs all stages; whatever ends this early, no process is left."""
        self._started = time.monotonic()
        waiting = list(self.reports)
        with self._log_path.open("w", errors="replace") as file:
            log = Log(file)
            try:
                while waiting or self._running:
                    while (report := self._next(waiting)) is not None:
                        waiting.remove(report)
                        self._start(report, log)
                    self._collect(log)
                    if self._running:
                        time.sleep(INTERVAL)
            finally:
                for report, child in list(self._running.values()):
                    child.kill()
                    report.end(child)
                    report.outcome, report.reason = CRASHED, "the runner was stopped"
                    self._finish(report, log)
                for report in waiting:
                    report.outcome, report.reason = NOT_RUN, "the runner was stopped"
                    self._finish(report, log)
        return self.reports

    @property
    def left(self) -> float:
        """Seconds until the deadline of all stages."""
        return self._deadline - (time.monotonic() - self._started)

    def _next(self, waiting: list[Report]) -> Report | None:
        """The stage that starts now. It may overtake others for which cores are missing, but none that is to be alone."""
        running = [report.stage for report, _ in self._running.values()]
        if any(stage.alone for stage in running):
            return None
        free = self._cores - sum(stage.cores for stage in running)
        for report in waiting:
            if not running or (not report.stage.alone and report.stage.cores <= free):
                return report
            if report.stage.alone:
                return None
        return None

    def _start(self, report: Report, log: Log) -> None:
        stage = report.stage
        if self.left < stage.least:
            report.outcome = NOT_RUN
            report.reason = f"{max(0.0, self.left):.0f} of {self._deadline:.0f} s were left"
            self._finish(report, log)
            return

        def take(line: str) -> None:
            report.take(line)
            log.write(stage.name, line)

        limit = min(stage.limit, self.left)
        environment = {**self._environment, **stage.environment, LIMIT: f"{limit:.1f}"}
        try:
            child = Child(stage.command, take, limit, environment)
        except OSError as error:
            report.outcome, report.reason = FAILED, f"{stage.command[0]} did not start: {error}"
            self._finish(report, log)
            return
        self._running[stage.name] = (report, child)

    def _collect(self, log: Log) -> None:
        for name, (report, child) in list(self._running.items()):
            if child.poll():
                del self._running[name]
                report.end(child)
                self._finish(report, log)

    def _finish(self, report: Report, log: Log) -> None:
        log.end(report.stage.name)
        with self._summary.open("a") as file:
            file.write(report.line() + "\n")
        now = time.monotonic() - self._started
        self._say(
            f"[{now:4.0f} s] {report.stage.name}: {report.outcome} in {report.seconds:.0f} s. {report.summary}"[:160]
        )


def table(reports: Sequence[Report], title: str, width: int = 150, most: int = ROWS_OF_TABLE) -> list[str]:
    """The last table, of at most `most` lines: one line per stage with its outcome, and below it lines of its own."""
    lines = [title]
    free = most - len(reports) - 2
    for place, report in enumerate(reports):
        lines.append(
            f"{report.stage.name:<12} {report.outcome:<9} {report.seconds:5.0f} s  {one_line(report.summary)}"[:width]
        )
        kept = report.table[: report.stage.rows]
        if report.outcome in BAD and not kept:
            kept = [one_line(line) for line in list(report.last)[-3:]]
        # Stages that come later keep one line each.
        kept = kept[: max(0, free - (len(reports) - place - 1))]
        free -= len(kept)
        lines += [f"    {line}"[:width] for line in kept]
    counts = {
        outcome: sum(report.outcome == outcome for report in reports) for outcome in (PASSED, *BAD, REFUSED, NOT_RUN)
    }
    lines.append(", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number))
    return lines[:most]


def one_line(text: str) -> str:
    """The text without line ends and control characters."""
    return re.sub(r"[\x00-\x1f]+", " ", text)
