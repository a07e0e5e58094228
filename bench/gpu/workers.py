"""Several processes of one stage at once: each costs only itself if it crashes or hangs."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gpu import marks
from bench.gpu.child import Child
from bench.gpu.runner import LIMIT


@dataclass
class Worker:
    """What one process left behind.

    Attributes:
        name: its name.
        status: the exit status, or the negative number of a signal; None if there was no time to start it.
        seconds: how long it took.
        figures: what it printed as figures.
        reason: why it failed or was refused; empty if it ended well.
        last: its last lines.
    """

    name: str
    status: int | None = None
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def outcome(self) -> str:
        """One word, as for stages."""
        if self.status is None:
            return "not run"
        if self.reason.startswith("killed after"):
            return "timed out"
        names = {0: "passed", marks.REFUSED_STATUS: "refused"}
        return names.get(self.status, "crashed" if self.status < 0 else "failed")

    @property
    def bad(self) -> bool:
        """True if the process failed, crashed or did not end in time."""
        return self.outcome not in ("passed", "refused")


def run_workers(
    commands: Mapping[str, Sequence[str]],
    limit: float,
    jobs: int | None = None,
    environment: Mapping[str, Mapping[str, str]] | None = None,
    on_figures: Callable[[dict[str, Worker]], None] = lambda workers: None,
) -> dict[str, Worker]:
    """Runs commands and passes their output on, with the name of the process before each line.

    Args:
        commands: by name, in the order in which they are to start.
        limit: seconds for all of them; what still runs then is killed.
        jobs: how many may run at once; all by default.
        environment: further variables of each process, by its name.
        on_figures: is called whenever a process has printed a figure, and when one has ended.

    Returns:
        What each of them left behind, by name.
    """
    workers = {name: Worker(name) for name in commands}
    waiting, running = list(commands), dict[str, Child]()
    deadline = time.monotonic() + limit
    changed = [0]

    def taker(worker: Worker) -> Callable[[str], None]:
        def take(line: str) -> None:
            worker.last.append(line)
            kind, value = marks.parsed(line)
            if kind == marks.FIGURE:
                worker.figures.update(value)
                changed[0] += 1
            elif kind in (marks.FAILED, marks.REFUSED):
                worker.reason = value
            else:
                print(f"{worker.name}: {line}", flush=True)

        return take

    seen = 0
    try:
        while waiting or running:
            while waiting and (jobs is None or len(running) < jobs):
                left = deadline - time.monotonic()
                name = waiting.pop(0)
                if left < 2.0:
                    continue
                own = {LIMIT: f"{left:.1f}", **(environment or {}).get(name, {})}
                running[name] = Child(commands[name], taker(workers[name]), left, own, own_group=False)
            for name, child in list(running.items()):
                if child.poll():
                    del running[name]
                    settle(workers[name], child)
                    changed[0] += 1
            if changed[0] != seen:
                seen = changed[0]
                on_figures(workers)
            if running:
                time.sleep(0.02)
    finally:
        for child in running.values():
            child.kill()
    return workers


def settle(worker: Worker, child: Child) -> None:
    """Stores how a process ended."""
    worker.status, worker.seconds = child.status, round(child.seconds, 2)
    if child.timed_out:
        worker.reason = f"killed after {child.limit:.0f} s"
    elif child.status is not None and child.status < 0:
        worker.reason = f"ended by signal {-child.status}"
    elif child.status and not worker.reason:
        worker.reason = next((line for line in reversed(worker.last) if line.strip()), "no output")


def cores() -> int:
    """The processor cores of this process."""
    return len(os.sched_getaffinity(0))


def judge(workers: Mapping[str, Worker]) -> None:
    """Prints the outcome of each process, and raises if one was bad or all were refused."""
    marks.figures(
        {
            worker.name: {
                "outcome": worker.outcome,
                "seconds": worker.seconds,
                **({"reason": worker.reason} if worker.reason else {}),
                **worker.figures,
            }
            for worker in workers.values()
        }
    )
    bad = [worker for worker in workers.values() if worker.bad]
    for worker in bad:
        marks.row(f"{worker.name}: {worker.outcome}: {worker.reason}")
    if bad:
        raise marks.Differs(f"{len(bad)} of {len(workers)} processes: {', '.join(worker.name for worker in bad)}")
    refused = [worker for worker in workers.values() if worker.outcome == "refused"]
    if workers and len(refused) == len(workers):
        raise marks.Refused(refused[0].reason)
    for worker in refused:
        marks.row(f"{worker.name}: refused: {worker.reason}")
