"""A rank that dies or stops in an exchange: all others raise an error that names it, in time, and nothing is left of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests.algorithms.gossip.common import ALL
from tests.comm.hosts import on_hosts

TIMEOUT = 6.0
GRACE = 2.0
D = 1 << 18  # parameters, so that most of the time is spent in exchanges


def opened() -> set[str]:
    """The open sockets and the threads of this process."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor
            place = os.readlink(f"/proc/self/fd/{name}")
            found |= {place} if place.startswith("socket:") else set()
    return found


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


def train(name: str) -> None:
    """Trains until an error comes; reports it, and what is left of the algorithm when it is closed."""
    communicator = comm.init(timeout=TIMEOUT)
    before = opened()
    module = torch.nn.Linear(D // 8, 8, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = ALL[name].make(module, optimizer, communicator, bucket_bytes=1 << 18)
    x = torch.ones(2, D // 8)
    try:
        for step in range(10**6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 10:
                print("under way", flush=True)
    except CommunicationError as error:
        report(at=time.time(), kind=type(error).__name__, ranks=getattr(error, "ranks", ()), text=str(error))
    with contextlib.suppress(CommunicationError):
        model.close()
    closed = time.time()
    while (left := opened() - before) and time.time() < closed + 5:
        time.sleep(0.02)
    report(closed=closed, left=sorted(left))
    communicator.abort("the test is over")


LOSSES = [
    ("decentralized", (signal.SIGKILL, 4, 1)),
    ("low_precision", (signal.SIGSTOP, 3, 0)),
    *itertools.product(ALL, ((signal.SIGKILL, 3, 2), (signal.SIGSTOP, 4, 0))),
]


@pytest.mark.parametrize(
    ("name", "how", "size", "victim"),
    [pytest.param(name, *row, marks=pytest.mark.slow) for name, row in LOSSES],
)
def test_a_lost_rank_is_named_in_time(name: str, how: signal.Signals, size: int, victim: int) -> None:
    """Those too that exchange nothing with it: on a ring of four its opposite hears of it from its neighbours."""
    with Processes(train, size, args=(name,)) as processes:
        for rank in range(size):
            processes.wait_for_output(rank, "under way", timeout=90)
        since = time.time()
        processes.send_signal(victim, how)
        survivors = [rank for rank in range(size) if rank != victim]
        results = processes.wait(90, survivors)
    for rank, result in zip(survivors, results, strict=True):
        assert result.returncode == 0, result.stderr[-3000:]
        check_survivor(rank, result.stdout, size, victim, since)


def check_survivor(rank: int, output: str, size: int, victim: int, since: float) -> None:
    """It raised in time, naming the victim, and little is left of what it had."""
    error, left = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert victim in error["ranks"], (rank, error)
    assert f"rank {victim}" in error["text"], (rank, error)
    assert error["kind"] == "RankLostError", (rank, error)
    assert error["at"] - since <= TIMEOUT + GRACE, (rank, error)
    assert not [each for each in left["left"] if each.startswith("thread")], (rank, left)
    # Gloo keeps the listener and the connections of a group that was given up, as it does in all algorithms.
    assert len(left["left"]) <= size, (rank, left)
    assert left["closed"] - error["at"] <= TIMEOUT + GRACE, (rank, error, left)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALL))
def test_a_rank_whose_host_is_unplugged_is_named_in_time(name: str) -> None:
    """Nothing tells the others but silence."""
    size, victim = 4, 1
    with on_hosts(train, [name], size) as hosts:
        hosts.wait_for_output("under way", timeout=90)
        since = hosts.unplug(victim)
        for rank in range(size):
            if rank != victim:
                check_survivor(rank, hosts.end(rank), size, victim, since)
