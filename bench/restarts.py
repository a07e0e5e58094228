"""Kills workers of a job that torchrun restarts as a whole; measures what that costs, and counts the samples that were drawn.

python -m bench.restarts [--kills 10] [--specs bytegrad onebit:min_numel=0,exact=none] [--output bench/results/restarts.json]

The job is `examples/elastic_restart.py`: processes of this machine, on loopback, with a checkpoint after every ten steps. Workers
are killed by SIGKILL, which of them and when is drawn by a seed. One kill in three is in the start of the workers. The others
are in training, in a step or in a save. Steps that are in the checkpoint from which the next workers begin are useful; others
are made again. The time after a kill ends with the first step that was not made before. It may contain the next kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "elastic_restart.py"
RANKS = 4
EPOCHS = 32
# Seconds after a new step, and after a kill, in which the next kill is drawn. Workers need a few to start.
IN_TRAINING, IN_START = 3.0, 6.0
_LIMIT = 600.0  # seconds for a job
_BEGIN = re.compile(r"begins after step (\d+), rank (\d+) of (\d+)")
_STEP = re.compile(r"epoch (\d+), step (\d+), rank (\d+) of (\d+), samples ([\d ]+)")
_LOSS = re.compile(r"final loss ([\d.]+), (\d+) samples")


@dataclass
class Start:
    """What the workers of one start have printed.

    Attributes:
        first: the number of steps in the checkpoint from which they began; None if none has begun.
        size: the number of ranks.
        steps: the epoch and the samples of each step, by rank.
        loss: at the end, and the number of samples of an epoch; None if they did not come to it.
    """

    first: int | None = None
    size: int = 0
    steps: dict[int, dict[int, tuple[int, list[int]]]] = field(default_factory=dict)
    loss: tuple[float, int] | None = None

    @property
    def last(self) -> int:
        """The last step that any of them has made."""
        return max((step for of_rank in self.steps.values() for step in of_rank), default=self.first or 0)


def starts_of(logs: Path) -> list[Start]:
    """Reads the logs of a job, which torchrun puts into a folder for each start.

    Raises:
        ValueError: workers of one start began after different steps.
    """
    found = []
    for folder in sorted(logs.glob("*/attempt_*"), key=_number):
        one = Start()
        for text in (file.read_text() for file in sorted(folder.glob("*/stdout.log"))):
            for first, _, size in _BEGIN.findall(text):
                if one.first not in (None, int(first)):
                    raise ValueError(f"workers of {folder} began after {one.first} and {first} steps")
                one.first, one.size = int(first), int(size)
            for epoch, step, rank, _, samples in _STEP.findall(text):
                one.steps.setdefault(int(rank), {})[int(step)] = int(epoch), [int(each) for each in samples.split()]
            if loss := _LOSS.search(text):
                one.loss = float(loss[1]), int(loss[2])
        found.append(one)
    return [one for one in found if one.first is not None]


def drawn(starts: Sequence[Start]) -> Counter[tuple[int, int]]:
    """Counts epochs and samples of the steps that count: of each start up to the checkpoint from which the next one began."""
    counts: Counter[tuple[int, int]] = Counter()
    ends = [one.first for one in starts[1:]] + [starts[-1].last]
    for one, end in zip(starts, ends, strict=True):
        assert end is not None
        for of_rank in one.steps.values():
            for step, (epoch, samples) in of_rank.items():
                if step <= end:
                    counts.update((epoch, sample) for sample in samples)
    return counts


def lost_and_doubled(starts: Sequence[Start], epochs: int, samples: int) -> tuple[int, int]:
    """Returns how many samples were left out of epochs, and how many came again."""
    counts = drawn(starts)
    lost = sum((epoch, sample) not in counts for epoch in range(epochs) for sample in range(samples))
    return lost, counts.total() - len(counts)


@dataclass
class Job:
    """A job under torchrun.

    Attributes:
        process: of torchrun's agent.
        logs: the folder of what its workers print.
    """

    process: subprocess.Popen[bytes]
    logs: Path

    def workers(self) -> list[int]:
        """The processes of the workers."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
        return [child for child in sorted(found) if _is_worker(child)]

    def steps(self) -> dict[int, int]:
        """The last step that any worker of each start has made."""
        found: dict[int, int] = {}
        for file in self.logs.glob("*/attempt_*/*/stdout.log"):
            start, of_rank = _number(file.parents[1]), _STEP.findall(_end(file))
            found[start] = max(found.get(start, 0), int(of_rank[-1][1]) if of_rank else 0)
        return found

    def ended(self) -> bool:
        """True once torchrun has ended."""
        return self.process.poll() is not None


def _number(folder: Path) -> int:
    return int(folder.name.partition("_")[2])


def _is_worker(process: int) -> bool:
    try:
        return PROGRAM.name in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def _end(file: Path) -> str:
    """The last lines of a file that grows."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 1000))
        return opened.read().decode()


@contextlib.contextmanager
def started(
    spec: str, folder: Path, name: str, *, ranks: int = RANKS, epochs: int = EPOCHS, restarts: int = 0
) -> Iterator[Job]:
    """Starts the example under torchrun, and ends it.

    Args:
        spec: of the algorithm.
        folder: of the checkpoint and the logs.
        name: of the logs of this job.
        ranks: the number of workers.
        epochs: of the training.
        restarts: how many of them torchrun may make.
    """
    logs = folder / name
    logs.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts), "--log-dir", str(logs), "--redirects", "3"]
    options = ["--algorithm", spec, "--folder", str(folder / "checkpoint"), "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (logs / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(PROGRAM), *options], env=environment, stdout=log, stderr=log
        )
    job = Job(process, logs)
    try:
        yield job
    finally:
        if not job.ended():
            left = job.workers()
            process.terminate()  # torchrun ends its workers then
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            for worker in filter(_is_worker, left):
                os.kill(worker, signal.SIGKILL)
            process.wait()


def kill(job: Job, number: random.Random) -> bool:
    """Kills a worker that is drawn; returns False if none is there any more."""
    while not job.ended():
        if workers := job.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number.choice(workers), signal.SIGKILL)
                return True
        time.sleep(0.01)
    return False


def follow(job: Job, until: Callable[[], bool], note: Callable[[], None] = lambda: None) -> bool:
    """Waits for something, or for the end of the job, of which it returns False; calls `note` meanwhile.

    Raises:
        TimeoutError: neither came.
    """
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        note()
        if job.ended():
            return False
        if until():
            return True
        time.sleep(0.01)
    raise TimeoutError(f"the job has not ended: {(job.logs / 'torchrun.log').read_text()[-2000:]}")


@dataclass
class Kills:
    """The kills of a job.

    Attributes:
        moments: when they were, and the newest start of workers then.
        seconds: from each to the first step that workers of a later start made, and none of an earlier one.
    """

    moments: list[tuple[float, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, job: Job) -> None:
        """Notes the kills after which a new step has been made by now."""
        while len(self.seconds) < len(self.moments):
            begin, start = self.moments[len(self.seconds)]
            steps, now = job.steps(), time.monotonic()
            before = max((step for each, step in steps.items() if each <= start), default=0)
            if all(step <= before for each, step in steps.items() if each > start):
                return
            self.seconds.append(now - begin)

    def are_over(self, job: Job) -> bool:
        """True if a new step has been made after each of them."""
        self.note(job)
        return len(self.seconds) == len(self.moments)


def disturb(job: Job, kills: int, seed: int) -> Kills:
    """Kills workers at moments that are drawn, and waits for the end of the job."""
    number, found = random.Random(seed), Kills()
    for each in range(kills):
        in_start = each % 3 == 2
        if not in_start:
            follow(job, lambda: found.are_over(job) and any(job.steps().values()))
        moment = time.monotonic() + number.uniform(0.0, IN_START if in_start else IN_TRAINING)
        follow(job, lambda moment=moment: time.monotonic() >= moment, lambda: found.note(job))  # type: ignore[misc]
        if kill(job, number):
            found.moments.append((time.monotonic(), max(job.steps(), default=0)))
    follow(job, lambda: False, lambda: found.note(job))
    found.note(job)
    return found


def measure(spec: str, kills: int, seed: int, ranks: int = RANKS, epochs: int = EPOCHS) -> dict[str, Any]:
    """Returns the figures of one job, beside the loss of one that nothing disturbs."""
    options: dict[str, Any] = {"ranks": ranks, "epochs": epochs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(spec, folder / "whole", "logs", **options) as job:
            follow(job, lambda: False)
        (whole,) = starts_of(job.logs)
        with started(spec, folder / "killed", "logs", **options, restarts=kills) as job:
            found = disturb(job, kills, seed)
        starts = starts_of(job.logs)
    assert whole.loss is not None
    loss, samples = starts[-1].loss or (None, whole.loss[1])
    lost, doubled = lost_and_doubled(starts, epochs, samples)
    return {
        "spec": spec,
        "ranks": ranks,
        "kills": len(found.moments),
        "seed": seed,
        "finished": job.process.returncode == 0,
        "kills_in_training": sum(one.last > (one.first or 0) for one in starts[:-1]),
        "loss": loss,
        "undisturbed_loss": whole.loss[0],
        "samples": epochs * samples,
        "lost_samples": lost,
        "doubled_samples": doubled,
        "useful_steps": starts[-1].last,
        "all_steps": sum(one.last - (one.first or 0) for one in starts),
        "new_step_seconds": {
            "median": statistics.median(found.seconds) if found.seconds else None,
            "worst": max(found.seconds, default=None),
            "all": found.seconds,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures; returns 1 if a job did not finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each job; 10 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of who is killed")
    parser.add_argument("--specs", nargs="+", default=["bytegrad", "onebit:min_numel=0,exact=none"])
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    found = []
    print(f"{'':30} {'kills':>5} {'done':>5} {'loss':>9} {'without':>9} {'lost':>5} {'doubled':>7} {'useful':>11} "
          f"{'new step after, s':>18}")  # fmt: skip
    for spec in options.specs:
        one = measure(spec, options.kills, options.seed)
        found.append(one)
        steps, seconds = f"{one['useful_steps']}/{one['all_steps']}", one["new_step_seconds"]
        print(
            f"{spec:30} {one['kills']:5} {'yes' if one['finished'] else 'no':>5} {one['loss'] or float('nan'):9.6f} "
            f"{one['undisturbed_loss']:9.6f} {one['lost_samples']:5} {one['doubled_samples']:7} {steps:>11} "
            f"{seconds['median'] or float('nan'):8.1f} {seconds['worst'] or float('nan'):9.1f}",
            flush=True,
        )
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one["finished"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
