"""The example of restarts under torchrun: killed workers cost time, and neither samples nor loss."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Algorithm
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.comm.testing.processes import free_port
from bench import restarts
from bench.restarts import Job, Start
from tests import limits

SAMPLES = 3072
# One with residuals of ranks and of owners, and one with momentum and residuals.
ONEBIT = "onebit:min_numel=0,exact=none,warmup_steps=5"
SPECS = [ONEBIT, "dgc:min_numel=0,exact=none,ratio=0.1"]


def example(spec: str, folder: str, epochs: int, last: int | None) -> None:
    """The program of the example, in a copy of a process that has imported the package; ends after the save of a step."""
    from bagua_kernels import checkpoint
    from examples import elastic_restart

    def save(path: Path, model: Algorithm, optimizer: torch.optim.Optimizer, **others: Any) -> None:
        checkpoint.save(path, model, optimizer, **others)
        if model.stats().steps == last:
            model.communicator.barrier().wait()
            os._exit(0)

    sys.argv[1:] = ["--algorithm", spec, "--folder", folder, "--epochs", str(epochs)]
    elastic_restart.checkpoint = SimpleNamespace(load=checkpoint.load, save=save)  # type: ignore[assignment]
    elastic_restart.main()


def undisturbed(spec: str, folder: Path, ranks: int, epochs: int, last: int | None = None) -> float:
    """The loss at the end where no worker is killed; NaN if all end after a step."""
    found = run_processes(
        example, ranks, args=[spec, str(folder), epochs, last], timeout=limits.seconds(60 + 6 * epochs)
    )
    assert [each.returncode for each in found] == [0] * ranks, found[0].stderr[-3000:]
    loss = restarts._LOSS.search(found[0].stdout)
    return math.nan if loss is None else float(loss[1])


def kill_after(job: Job, number: random.Random, steps: int) -> None:
    """Kills a worker that is drawn, in the next step or save."""
    assert restarts.follow(job, lambda: max(job.steps().values(), default=0) >= steps)
    assert restarts.kill(job, number)


def log(job: Job) -> str:
    return (job.logs / "torchrun.log").read_text()[-3000:]


# Torchrun imports PyTorch, and so do its workers at each start.
@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_worker_costs_neither_samples_nor_loss(tmp_path: Path) -> None:
    """The bits of the loss are those of a training that nothing disturbs."""
    ranks, epochs, number = 2, 1, random.Random(0)
    with restarts.started(ONEBIT, tmp_path, "logs", ranks=ranks, epochs=epochs, restarts=3) as job:
        kill_after(job, number, number.randrange(20, 150))
        restarts.follow(job, lambda: False)
    assert job.process.returncode == 0, log(job)
    starts = restarts.starts_of(job.logs)
    assert len(starts) == 2
    assert starts[1].first in range(10, starts[0].last + 1)
    assert restarts.lost_and_doubled(starts, epochs, SAMPLES) == (0, 0)
    loss = undisturbed(ONEBIT, tmp_path / "whole", ranks, epochs)
    assert starts[-1].loss == (loss, SAMPLES)
    assert loss < 0.9 < 1.38  # that of four classes at the start


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spec", SPECS)
def test_kills_at_any_moment(spec: str, tmp_path: Path) -> None:
    """In the start of the workers, too; `python -m bench.restarts` has ten kills."""
    ranks, epochs = 4, 8
    with restarts.started(spec, tmp_path, "logs", ranks=ranks, epochs=epochs, restarts=6) as job:
        kills = restarts.disturb(job, 4, seed=1)
    assert job.process.returncode == 0, log(job)
    assert len(kills.moments) == 4
    starts = restarts.starts_of(job.logs)
    assert restarts.lost_and_doubled(starts, epochs, SAMPLES) == (0, 0)
    assert starts[-1].loss == (undisturbed(spec, tmp_path / "whole", ranks, epochs), SAMPLES)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spec", SPECS)
def test_four_workers_then_three_then_four(spec: str, tmp_path: Path) -> None:
    """Each launcher is ended by the loss of a worker. The loss has the bits of ranks that come and go without a kill."""
    epochs, number, starts = 3, random.Random(2), list[Start]()
    for name, ranks, steps in (("first", 4, 60), ("second", 3, 180), ("third", 4, None)):
        with restarts.started(spec, tmp_path, name, ranks=ranks, epochs=epochs) as job:
            if steps is not None:
                kill_after(job, number, steps)
            restarts.follow(job, lambda: False)
        assert (job.process.returncode == 0) == (steps is None), log(job)
        starts += restarts.starts_of(job.logs)
    assert [one.size for one in starts] == [4, 3, 4]
    assert all(before.first < after.first for before, after in itertools.pairwise(starts))  # type: ignore[operator]
    lost, doubled = restarts.lost_and_doubled(starts, epochs, SAMPLES)
    # Where a number of ranks does not divide what is left of an epoch, its last steps have samples again.
    assert lost == 0
    assert doubled <= 2 * 3
    for ranks, last in ((4, starts[1].first), (3, starts[2].first), (4, None)):
        loss = undisturbed(spec, tmp_path / "whole", ranks, epochs, last)
    assert starts[-1].loss == (loss, SAMPLES)


def agent(folder: Path, number: int, port: int, epochs: int) -> subprocess.Popen[bytes]:
    """Starts torchrun as on a machine of its own, with one worker; of its restarts some have the folder of the former logs."""
    rendezvous = f"is_host={number == 0},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=3"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={rendezvous}",
        "--redirects=3",
    ]
    command += [
        "--rdzv-id=elastic",
        f"--log-dir={folder / f'agent{number}'}",
        str(restarts.PROGRAM),
        "--algorithm",
        ONEBIT,
    ]
    command += ["--folder", str(folder / "checkpoint"), "--epochs", str(epochs)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(restarts.ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"torchrun{number}.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(500)
def test_torchrun_goes_on_with_other_numbers_of_machines(tmp_path: Path) -> None:
    """Four agents, of which one is lost with its worker, and another one that comes later."""
    port, jobs = free_port(), dict[int, Job]()

    def start(number: int) -> None:
        folder = tmp_path / f"agent{number}"
        folder.mkdir()
        jobs[number] = Job(agent(tmp_path, number, port, 30), folder)

    def train(size: int, first: int = 0) -> bool:
        """Some workers have taken steps in such a number, from such a step on."""
        found = [one for job in jobs.values() for one in restarts.starts_of(job.logs)]
        return any(one.size == size and one.last - 20 > one.first >= first for one in found if one.first is not None)

    def outputs() -> str:
        return "".join(file.read_text()[-1500:] for file in sorted(tmp_path.glob("torchrun*.log")))

    try:
        for number in range(4):
            start(number)
        limits.until(lambda: train(4), "four workers train", 100)
        lost = jobs.pop(3)
        workers = lost.workers()
        lost.process.kill()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        lost.process.wait()
        limits.until(lambda: train(3), "three workers train", 100)
        start(4)
        limits.until(lambda: train(4, first=10), "four workers train again", 100)
        for job in jobs.values():
            restarts.follow(job, lambda: False)
            assert job.process.returncode == 0, outputs()
    finally:
        for job in jobs.values():
            if not job.ended():
                job.process.terminate()
            job.process.wait()
    losses = [one.loss for job in jobs.values() for one in restarts.starts_of(job.logs) if one.loss]
    assert len(losses) == 1
    # More steps than four ranks take, each of fewer samples.
    assert losses[0][0] < 1.02 * undisturbed(ONEBIT, tmp_path / "whole", 4, 30)


def test_samples_that_are_lost_or_come_again_are_counted() -> None:
    """Two ranks, two steps of two samples: the second start begins after the first step."""
    first = Start(0, 2, {0: {1: (0, [0, 1]), 2: (0, [4, 5])}, 1: {1: (0, [2, 3])}})
    right = Start(1, 2, {0: {2: (0, [4, 5])}, 1: {2: (0, [6, 7])}})
    assert restarts.lost_and_doubled([first, right], 1, 8) == (0, 0)
    again = Start(1, 2, {0: {2: (0, [0, 5])}, 1: {2: (0, [6, 7])}})
    assert restarts.lost_and_doubled([first, again], 1, 8) == (1, 1)
    late = Start(2, 2, {})
    assert restarts.lost_and_doubled([first, late], 1, 8) == (2, 0)
