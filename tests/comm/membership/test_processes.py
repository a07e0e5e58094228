"""Processes of which one is killed, stopped, or leaves: the others go on over the sockets that they have."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.testing.processes import Processes
from bagua_kernels.errors import MembershipError
from tests import limits
from tests.algorithms.test_healing import Net, step_of, vector

pytestmark = pytest.mark.processes
LIMIT = limits.seconds(60)


def trains(spec: str, steps: int, pause: float, timeout: float, catches: bool = True) -> None:
    communicator = comm.init(elastic=True, timeout=timeout)
    members, name = communicator.members, comm.rank()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = from_spec(spec, net, optimizer, on_failure="heal")
    try:
        for step in range(steps):
            step_of(algorithm, optimizer, name, step)
            print("STEP", step, comm.size(), flush=True)
            time.sleep(pause)
    except MembershipError as error:
        print("OUT", error, flush=True)
        if not catches:
            raise
        return
    own = vector(net)
    algorithm.close()
    print("REPORT", json.dumps([members.epoch, members.ranks, comm.size(), own.double().sum().item()]), flush=True)
    comm.shutdown()


def until(processes: Processes, rank: int, text: str) -> None:
    limits.until(lambda: text in processes.output(rank), lambda: processes.output(rank), pause=0.02)


def reports(processes: Processes, ranks: list[int]) -> list[Any]:
    results = processes.wait(LIMIT, ranks)
    assert [one.returncode for one in results] == [0] * len(ranks), "\n".join(one.stderr[-2000:] for one in results)
    lines = [line for one in results for line in one.stdout.splitlines() if line.startswith("REPORT ")]
    return [json.loads(line[7:]) for line in lines]


@pytest.mark.parametrize(
    ("spec", "victim"), [("bytegrad", 0), pytest.param("decentralized:peers=ring", 2, marks=pytest.mark.slow)]
)
def test_a_rank_is_killed(spec: str, victim: int) -> None:
    """Rank 0, too, whose process has the store of the start."""
    with Processes(trains, 4, args=[spec, 60, 0.01, 10.0]) as processes:
        until(processes, victim, "STEP 9 ")
        processes.send_signal(victim, signal.SIGKILL)
        left = [rank for rank in range(4) if rank != victim]
        found = reports(processes, left)
    assert [each[:3] for each in found] == [[2, left, 3]] * 3
    if spec == "bytegrad":
        assert len({each[3] for each in found}) == 1


def test_a_rank_that_stops_is_left_out() -> None:
    """The others wait for the timeout; it learns of that when it goes on."""
    with Processes(trains, 3, args=["bytegrad", 60, 0.01, 2.0]) as processes:
        until(processes, 1, "STEP 9 ")
        processes.send_signal(1, signal.SIGSTOP)
        found = reports(processes, [0, 2])
        processes.send_signal(1, signal.SIGCONT)
        until(processes, 1, "OUT ")
        assert "went on without this one" in processes.output(1)
    assert [each[:3] for each in found] == [[2, [0, 2], 2]] * 2


@pytest.mark.parametrize("spec", ["bytegrad", pytest.param("sparse_loco:interval=4", marks=pytest.mark.slow)])
def test_a_signal_is_a_notice(spec: str) -> None:
    """The rank ends with the status 0, and the others go on. Rank 0 has the store of the start."""
    with Processes(trains, 3, args=[spec, 60, 0.01, 10.0]) as processes:
        until(processes, 0, "STEP 9 ")
        processes.send_signal(0, signal.SIGTERM)
        (gone,) = processes.wait(LIMIT, [0])
        found = reports(processes, [1, 2])
    assert gone.returncode == 0, gone.stderr
    assert [each[:3] for each in found] == [[3, [1, 2], 2]] * 2


@pytest.mark.slow
def test_the_error_of_a_rank_that_was_left_out_ends_nobody_else() -> None:
    with Processes(trains, 3, args=["bytegrad", 200, 0.02, 2.0, False]) as processes:
        until(processes, 1, "STEP 9 ")
        processes.send_signal(1, signal.SIGSTOP)
        until(processes, 0, " 2\n")
        processes.send_signal(1, signal.SIGCONT)
        until(processes, 1, "OUT ")
        assert [each[:3] for each in reports(processes, [0, 2])] == [[2, [0, 2], 2]] * 2
        assert processes.wait(LIMIT, [1])[0].returncode == 1
