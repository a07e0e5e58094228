"""The code around an example's training loop: it starts the processes and draws a progress bar, a table and a picture."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
LAB = "bench.netlab"  # the module that emulates hosts
LONGEST = 1800  # seconds after which processes on emulated hosts are ended
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
INK, GREY = "#222222", "#8a8a8a"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": GREY,
    "ytick.color": GREY,
}


class Stats(Protocol):
    """Counters of an algorithm since its first step, as `stats()` of the algorithms returns them."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""

    @property
    def wait_seconds(self) -> float:
        """Seconds in which training waited for communication."""


def under_torchrun(processes: int) -> None:
    """Starts this program again under torchrun with several processes, unless torchrun has started it."""
    if processes == 1 or torch.distributed.is_torchelastic_launched():
        return
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--"]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def path_with_root() -> str:
    """Returns PYTHONPATH with the root of the repository, where the lab is."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def look_for_hosts(rate: float) -> tuple[bool, str]:
    """Returns whether hosts can be emulated here, and what they are like, or why they cannot.

    Args:
        rate: of each host's line, Mbit/s in each direction.
    """
    if not (ROOT / "bench").is_dir():
        return False, f"no emulated hosts: they need the folder bench of the repository, which is not in {ROOT}"
    environment = {**os.environ, "PYTHONPATH": path_with_root()}
    command = [sys.executable, "-m", LAB, "check", "--rate", f"{rate}"]
    try:
        check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False, "no emulated hosts: a look for them took longer than 60 s"
    lines = (check.stdout or check.stderr).splitlines()
    if check.returncode:
        return False, lines[-1] if lines else f"no emulated hosts: {LAB} check ended with {check.returncode}"
    return True, lines[0]


def on_emulated_hosts(hosts: int, rate: float) -> str:
    """Starts this program again with one process on each of several emulated hosts, if this machine allows that.

    Args:
        hosts: how many.
        rate: of each host's line, Mbit/s in each direction.

    Returns:
        Why there are no such hosts on this machine. If there are, this process becomes them and never returns.
    """
    found, answer = look_for_hosts(rate)
    os.environ["PYTHONPATH"] = path_with_root()
    if not found:
        return answer
    print(f"{hosts} emulated hosts, {answer}", flush=True)
    options = ["--hosts", f"{hosts}", "--rate", f"{rate}", "--timeout", f"{LONGEST}"]
    os.execv(sys.executable, [sys.executable, "-m", LAB, "run", *options, "--", sys.executable, *sys.argv])


class Run:
    """One training run: shows a progress bar on rank 0 and stores the measurements.

    Evaluations count neither as time nor as bytes.

    Attributes:
        algorithm: name of the algorithm, as on the command line.
        parameters: number of trainable values in the model.
        ranks: number of processes.
        loss: loss of rank 0, for each step.
        seconds: seconds from the start of the first step to the end of each step.
        waited: seconds in which training waited for communication, from the first step to the end of each step.
        bytes_sent: bytes that rank 0 sent, from the first step to the end of each step.
        evaluations: pairs of a number of steps and the accuracy or loss on data held back, after these steps.
        measured: number of steps whose times were extrapolated to all steps; None if the times of all were measured.
    """

    WARM_UP = 5  # first steps, which no time includes: kernels are compiled and memory is allocated in them

    def __init__(
        self,
        algorithm: str,
        model: nn.Module,
        steps: int,
        rank: int,
        ranks: int,
        unit: str = "images",
        evaluation: str = "test {:.1%}",
    ) -> None:
        """Prepares a run; it begins with a `with` block.

        Args:
            algorithm: its name.
            model: what is trained.
            steps: how many there will be.
            rank: of this process.
            ranks: number of processes.
            unit: what a batch consists of, in the progress bar.
            evaluation: format of an evaluation, in the progress bar.
        """
        self.algorithm = algorithm
        self.parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.ranks = ranks
        self.loss: list[float] = []
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.bytes_sent: list[int] = []
        self.evaluations: list[tuple[int, float]] = []
        self.measured: int | None = None
        self._bytes_aside = 0
        self._evaluation = evaluation
        self._clock = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn(
                f"loss {{task.fields[loss]:.3f}} {{task.fields[rate]:6,.0f}} {unit}/s {{task.fields[evaluation]}}"
            ),
            TimeElapsedColumn(),
            disable=rank != 0,
        )
        self._task = self._bar.add_task(f"{algorithm:<9}", total=steps, loss=float("nan"), rate=0.0, evaluation="")

    def __enter__(self) -> Run:
        self._bar.start()
        self._clock = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, loss: float, count: int, stats: Stats) -> None:
        """Stores the measurements of a step that has just ended, whose batch had `count` images or other units."""
        now = time.perf_counter()
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + now - self._clock)
        self._clock = now
        self.loss.append(loss)
        self.waited.append(stats.wait_seconds)
        self.bytes_sent.append(stats.bytes_sent - self._bytes_aside)
        recent = self.seconds[-20:]
        rate = (len(recent) - 1) * count * self.ranks / (recent[-1] - recent[0]) if len(recent) > 1 else 0.0
        self._bar.update(self._task, advance=1, loss=statistics.fmean(self.loss[-20:]), rate=rate)

    def evaluation(self, value: float, stats: Stats | None = None) -> None:
        """Stores the accuracy or loss on data held back, after the last step.

        Args:
            value: of the evaluation.
            stats: of the algorithm, to leave out the bytes that the evaluation has sent.
        """
        self.evaluations.append((len(self.loss), value))
        if stats is not None:
            self._bytes_aside = stats.bytes_sent - self.bytes_sent[-1]
        self._bar.update(self._task, evaluation=self._evaluation.format(value))
        self._clock = time.perf_counter()

    def extrapolate(self, few: Run) -> None:
        """Replaces the times by those of a few measured steps, as if all steps took as long as they did."""
        each, share = few.seconds_per_step, few.waiting_share
        self.measured = len(few.loss)
        self.seconds = [each * step for step in range(1, len(self.loss) + 1)]
        self.waited = [share * seconds for seconds in self.seconds]

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank sends in a step."""
        return self.bytes_sent[-1] / len(self.bytes_sent)

    @property
    def compression_ratio(self) -> float | None:
        """Traffic of a ring all-reduce of float32 gradients, divided by this run's; None without traffic."""
        exact = 2 * (self.ranks - 1) / self.ranks * 4 * self.parameters
        return exact / self.bytes_per_step if self.bytes_per_step else None

    @property
    def seconds_per_step(self) -> float:
        """Median time of a step, without the warm-up."""
        times = np.diff(self.seconds, prepend=0.0)
        return float(np.median(times[self.warm_up :]))

    @property
    def seconds_after_warm_up(self) -> list[float]:
        """Seconds from the end of the warm-up to the end of each step; NaN for the steps of the warm-up."""
        if not self.warm_up:
            return self.seconds
        compiled = self.seconds[self.warm_up - 1]
        return [time - compiled if time >= compiled else float("nan") for time in self.seconds]

    @property
    def waiting_share(self) -> float:
        """Share of the time in which training waited for communication, without the warm-up."""
        first = self.warm_up
        seconds, waited = ([0.0, *series] for series in (self.seconds, self.waited))
        return (waited[-1] - waited[first]) / (seconds[-1] - seconds[first])

    @property
    def warm_up(self) -> int:
        """Number of first steps that no time includes: `WARM_UP`, or 0 if the run is too short for it."""
        return self.WARM_UP if len(self.seconds) > 2 * self.WARM_UP else 0


def write(runs: Sequence[Run], folder: Path, options: Mapping[str, object]) -> None:
    """Prints a table of the runs, and writes their numbers and their picture to a folder."""
    ranks = runs[0].ranks
    table = Table(title=f"{options['dataset']}, ranks: {ranks}, epochs: {options['epochs']}")
    table.add_column("algorithm", overflow="fold")
    for heading in ("test\naccuracy", "sent per step\nand rank", "compression", "time\nper step", "of it\nwaiting"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.algorithm,
            f"{run.evaluations[-1][1]:.2%}",
            f"{run.bytes_per_step / 1e3:,.1f} kB",
            f"{run.compression_ratio:.2f} ×" if run.compression_ratio else "–",
            f"{run.seconds_per_step * 1e3:.1f} ms",
            f"{run.waiting_share:.1%}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "options": dict(options),
        "ranks": ranks,
        "parameters": runs[0].parameters,
        "runs": [_numbers(run) for run in runs],
    }
    (folder / "train.json").write_text(json.dumps(numbers, indent=1, default=str) + "\n")
    picture(runs, folder / "train.png", f"{options['dataset']}, ranks: {ranks}")
    console = Console()
    console.print(table)
    console.print(f"picture: {folder / 'train.png'}   numbers: {folder / 'train.json'}")


def _numbers(run: Run) -> dict[str, Any]:
    return {
        "algorithm": run.algorithm,
        "test_accuracy": run.evaluations[-1][1],
        "bytes_per_step": run.bytes_per_step,
        "compression_ratio": run.compression_ratio,
        "seconds_per_step": run.seconds_per_step,
        "waiting_share": run.waiting_share,
        "steps": len(run.loss),
        "accuracy": [{"step": step, "accuracy": accuracy} for step, accuracy in run.evaluations],
        "loss": [round(value, 6) for value in run.loss],
        "seconds": [round(value, 6) for value in run.seconds],
        "waited": [round(value, 6) for value in run.waited],
        "bytes_sent": run.bytes_sent,
    }


def picture(runs: Sequence[Run], path: Path, title: str) -> None:
    """Draws loss and accuracy against time and against bytes sent.

    Time starts after the warm-up of each run, so that no curve contains the compilation of kernels.
    """
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, 2, figsize=(10, 6.6), sharex="col", sharey="row", layout="constrained")
        for run, colour in zip(runs, COLOURS * len(runs), strict=False):
            for column, axis in enumerate((run.seconds_after_warm_up, [count / 1e6 for count in run.bytes_sent])):
                panels[0, column].plot(axis, run.loss, color=colour, linewidth=0.6, alpha=0.2)
                panels[0, column].plot(axis, smooth(run.loss), color=colour, linewidth=1.8, label=run.algorithm)
                steps, accuracies = zip(*run.evaluations, strict=True)
                reached = [axis[step - 1] for step in steps]
                panels[1, column].plot(
                    reached, [100 * value for value in accuracies], "o-", color=colour, markersize=4.5, linewidth=1.8
                )
        lowest = min(min(smooth(run.loss)) for run in runs)
        panels[0, 0].set(ylabel="training loss, rank 0", yscale="log", ylim=(lowest / 2, None))
        warm_up = max(run.warm_up for run in runs)
        left_out = f" after the first {warm_up} steps (kernels compile in them)" if warm_up else ""
        panels[1, 0].set(ylabel="test accuracy, %", xlabel=f"training time{left_out}, s")
        panels[1, 1].set(xlabel="sent by a rank, MB")
        panels[0, 1].legend(frameon=False, loc="upper right")
        figure.align_ylabels()
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def smooth(values: Sequence[float], length: int = 20) -> list[float]:
    """Returns the mean of the last `length` values up to each place."""
    return [statistics.fmean(values[max(0, end - length) : end]) for end in range(1, len(values) + 1)]
