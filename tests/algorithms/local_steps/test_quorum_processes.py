"""A quorum of processes goes on without one that is killed or stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import DiLoCo
from bagua_kernels.comm.testing import Processes
from tests import limits
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

TIMEOUT, RANKS = limits.seconds(3.0), 4
# Steps after the loss. Waits for the lost rank in each of their rounds would take ten times the limit that ends the test.
STEPS = 400


def train_on(folder: str) -> None:
    """One rank: trains until it has taken some steps after the loss, takes the mean, and prints what it has."""
    communicator = comm.init(timeout=limits.seconds(60))  # a start may take longer, with other tests beside it
    torch.manual_seed(0)
    module = Odd()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    # Imports come before it.
    communicator.barrier().wait()
    communicator.set_timeout(TIMEOUT)
    model = DiLoCo(module, optimizer, interval=2, quorum=RANKS - 1)
    step = left = 0
    while not left or step < left:
        model(batch(comm.rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if not left and Path(folder, "lost").exists():
            left = step + STEPS
        if step == 20:
            print("GOING", flush=True)
        time.sleep(0.005)
    model.synchronize()
    value = torch.cat([p.detach().flatten() for p in module.parameters()]).double().sum().item()
    model.close()
    print("ENDED", value.hex(), flush=True)


@pytest.mark.slow
@grid(victim=[2, 0], how=["SIGKILL", "SIGSTOP"], cover=1, most=1)
def test_a_lost_process_is_absent(victim: int, how: str, tmp_path: Path) -> None:
    """The first leader, and another rank. One that is stopped is waited for once or twice, not in each round."""
    with Processes(train_on, RANKS, args=[str(tmp_path)]) as processes:
        for rank in range(RANKS):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        processes.send_signal(victim, signal.Signals[how])
        (tmp_path / "lost").touch()
        left = [rank for rank in range(RANKS) if rank != victim]
        ends = []
        for rank in left:
            processes.wait_for_output(rank, "ENDED", timeout=limits.seconds(60))
            ends.append(processes.output(rank).split("ENDED", 1)[1].split())
        assert len({value for (value,) in ends}) == 1, ends
