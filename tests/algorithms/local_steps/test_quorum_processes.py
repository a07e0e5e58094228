"""A quorum of processes goes on without one that is killed or stopped."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import DiLoCo
from bagua_kernels.comm.testing import Processes
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

TIMEOUT, RANKS = 3.0, 4


def train_on() -> None:
    """One rank: trains for a time, takes the mean, and prints what it has."""
    comm.init(timeout=60).set_timeout(TIMEOUT)  # a start may take longer, with other tests beside it
    torch.manual_seed(0)
    module = Odd()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DiLoCo(module, optimizer, interval=2, quorum=RANKS - 1)
    began, step, longest = time.monotonic(), 0, 0.0
    while time.monotonic() < began + 4 * TIMEOUT:
        before = time.monotonic()
        model(batch(comm.rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        longest = max(longest, time.monotonic() - before)
        step += 1
        if step == 20:
            print("GOING", flush=True)
        time.sleep(0.005)
    model.synchronize()
    value = torch.cat([p.detach().flatten() for p in module.parameters()]).double().sum().item()
    model.close()
    print("ENDED", longest, value.hex(), flush=True)


@pytest.mark.slow
@grid(victim=[2, 0], how=["SIGKILL", "SIGSTOP"], cover=1, most=1)
def test_a_lost_process_is_absent(victim: int, how: str) -> None:
    """The first leader, and another rank. What waits for one that is stopped ends within twice the timeout."""
    with Processes(train_on, RANKS) as processes:
        for rank in range(RANKS):
            processes.wait_for_output(rank, "GOING", timeout=60)
        processes.send_signal(victim, signal.Signals[how])
        left = [rank for rank in range(RANKS) if rank != victim]
        ends = []
        for rank in left:
            processes.wait_for_output(rank, "ENDED", timeout=60)
            ends.append(processes.output(rank).split("ENDED", 1)[1].split())
        assert len({value for _, value in ends}) == 1, ends
        assert all(float(longest) < 2 * TIMEOUT + 2 for longest, _ in ends), ends
