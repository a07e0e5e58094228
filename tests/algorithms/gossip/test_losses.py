"""A rank that dies or stops in an exchange: all others raise an error that names it, and nothing is left of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.algorithms.gossip.common import ALL
from tests.comm.hosts import on_hosts

# A rank that is killed is missed at once: the timeout of its neighbours must not end their wait.
TIMEOUTS = {signal.SIGKILL: limits.NEVER, signal.SIGSTOP: limits.seconds(6)}
D = 1 << 18  # parameters, so that most of the time is spent in exchanges


def opened() -> set[str]:
    """The open sockets and the threads of this process."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor
            place = os.readlink(f"/proc/self/fd/{name}")
            found |= {place} if place.startswith("socket:") else set()
    return found


def few(left: set[str], most: int) -> bool:
    """True if no thread is left, and no more than some sockets."""
    return len(left) <= most and not any(each.startswith("thread") for each in left)


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


def train(name: str, timeout: float) -> None:
    """Trains until an error comes; reports it, and what is left of the algorithm when it is closed."""
    communicator = comm.init(timeout=limits.seconds(60))
    communicator.set_timeout(timeout)
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
        report(kind=type(error).__name__, ranks=getattr(error, "ranks", ()), text=str(error))
    with contextlib.suppress(CommunicationError):
        model.close()
    # Gloo keeps the listener and the connections of a group that was given up, as it does in all algorithms.
    most = communicator.size
    with contextlib.suppress(TimeoutError):
        limits.until(lambda: few(opened() - before, most), "little is left", limit=5)
    report(left=sorted(opened() - before))
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
def test_a_lost_rank_is_named(name: str, how: signal.Signals, size: int, victim: int) -> None:
    """Those too that exchange nothing with it: on a ring of four its opposite hears of it from its neighbours."""
    with Processes(train, size, args=(name, TIMEOUTS[how])) as processes:
        for rank in range(size):
            processes.wait_for_output(rank, "under way", timeout=limits.seconds(90))
        processes.send_signal(victim, how)
        survivors = [rank for rank in range(size) if rank != victim]
        results = processes.wait(limits.seconds(90), survivors)
    for rank, result in zip(survivors, results, strict=True):
        assert result.returncode == 0, result.stderr[-3000:]
        check_survivor(rank, result.stdout, size, victim)


def check_survivor(rank: int, output: str, size: int, victim: int) -> None:
    """It raised, naming the victim, and little is left of what it had."""
    error, left = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert victim in error["ranks"], (rank, error)
    assert f"rank {victim}" in error["text"], (rank, error)
    assert error["kind"] == "RankLostError", (rank, error)
    assert few(set(left["left"]), size), (rank, left)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALL))
def test_a_rank_whose_host_is_unplugged_is_named(name: str) -> None:
    """Nothing tells the others but silence."""
    size, victim = 4, 1
    with on_hosts(train, [name, TIMEOUTS[signal.SIGSTOP]], size) as hosts:
        hosts.wait_for_output("under way", timeout=90)
        hosts.unplug(victim)
        for rank in range(size):
            if rank != victim:
                check_survivor(rank, hosts.end(rank), size, victim)
