"""Processes that join a job which runs: with the neighbours' bits, at the right sample, and only with the job's secret."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bagua_kernels import comm, knobs
from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.data.balanced_sampler import LoadBalancingDistributedSampler
from bagua_kernels.comm.joining.installed import Installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.agreement import Census
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.door import Door, knock, receive, send
from bagua_kernels.comm.membership.membership import _furthest
from bagua_kernels.comm.testing.processes import Processes, free_port
from bagua_kernels.errors import CommunicationError, MismatchError
from tests import limits
from tests.algorithms.test_healing import Net, step_of, vector
from tests.comm.membership.test_processes import LIMIT, until

STEPS = 80
SECRET = "known to the ranks of this test alone"
ENV = {"BAGUA_KERNELS_SECRET": SECRET}


def trains(spec: str, steps: int, ports: int, joins: bool, stays: bool) -> None:
    doors = ",".join(f"127.0.0.1:{ports + at}" for at in range(3))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    where = {"join": doors} if joins else {"elastic": True, "listen": f"127.0.0.1:{ports}"}
    members = comm.init(timeout=10.0, **where).members  # type: ignore[arg-type]
    print("INIT", members.name, members.address, flush=True)
    if not stays:
        time.sleep(LIMIT)
    algorithm = from_spec(spec, net, optimizer, on_failure="heal")
    begun = algorithm.stats().steps
    for step in range(begun, steps):
        if step == steps - 20 and not joins:
            members.wait_for(3)
        step_of(algorithm, optimizer, members.name, step)
        print("STEP", step, comm.size(), flush=True)
        time.sleep(0.01)
    own = vector(net).double().sum().item()
    algorithm.synchronize()
    mean = vector(net).double().sum().item()
    print("REPORT", json.dumps([members.ranks, begun > 0, members.joins, own, mean]), flush=True)
    algorithm.close()
    comm.shutdown()


@contextmanager
def job(spec: str, steps: int = STEPS) -> Iterator[tuple[Processes, int]]:
    """Three ranks, of which the first is killed."""
    port = free_port()
    with Processes(trains, 3, args=[spec, steps, port, False, True], env=ENV) as processes:
        until(processes, 1, "STEP 9 ")
        processes.send_signal(0, signal.SIGKILL)
        yield processes, port


def reports(processes: Processes, ranks: list[int]) -> list[Any]:
    results = processes.wait(LIMIT, ranks)
    assert [one.returncode for one in results] == [0] * len(ranks), "\n".join(one.stderr[-3000:] for one in results)
    lines = [line for one in results for line in one.stdout.splitlines() if line.startswith("REPORT ")]
    return [json.loads(line[7:]) for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize(
    "spec",
    [
        "bytegrad",
        *(
            pytest.param(spec, marks=pytest.mark.slow)
            for spec in (
                "diloco:interval=4",
                "onebit:min_numel=0,exact=none,warmup_steps=0",
                "dgc",
                "powersgd:rank=2",
                "decentralized:peers=ring",
                "choco:peers=ring,eta=0.4",
                "sparse_loco:interval=4",
                "async_model_average",
                "wagma",
            )
        ),
    ],
)
def test_a_killed_rank_comes_back(spec: str) -> None:
    """As a new member, with what the others have alike: replicas with the same gradients have the same bits."""
    with job(spec) as (processes, port), Processes(trains, 1, args=[spec, STEPS, port, True, True], env=ENV) as new:
        found = reports(new, [0]) + reports(processes, [1, 2])
    assert [each[0] for each in found] == [[1, 2, 3]] * 3
    assert [each[1] for each in found] == [True, False, False]
    assert [each[2] for each in found] == [0, 1, 1]
    assert len({each[4] for each in found}) == 1
    if spec.startswith(("bytegrad", "onebit", "dgc", "powersgd")):
        assert len({each[3] for each in found}) == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_new_member_that_dies_is_left_out() -> None:
    """The others wait for it in the middle of the epoch's begin."""
    with (
        job("bytegrad") as (processes, port),
        Processes(trains, 1, args=["bytegrad", STEPS, port, True, False], env=ENV) as new,
    ):
        until(new, 0, "INIT 3 ")
        new.send_signal(0, signal.SIGKILL)
        with Processes(trains, 1, args=["bytegrad", STEPS, port, True, True], env=ENV) as newer:
            found = reports(newer, [0]) + reports(processes, [1, 2])
    assert [each[0] for each in found] == [[1, 2, 4]] * 3


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_never_connects_is_left_out() -> None:
    """It knows the secret, asks, and is not where it claims to be. Another one may join afterwards."""
    with job("bytegrad") as (processes, port):
        door = re.findall(r"^INIT 1 \('127\.0\.0\.1', (\d+)\)", processes.output(1), re.M)
        sock, _ = knock(("127.0.0.1", int(door[0])), Secret.from_text(SECRET), limits.seconds(10.0))
        sock.settimeout(limits.seconds(20.0))
        with sock:
            request = {"address": ["127.0.0.1", free_port()], "installed": Installed.here().told(), "tensors": "cpu"}
            send(sock, request)
            assert receive(sock)["name"] == 3
        with Processes(trains, 1, args=["bytegrad", STEPS, port, True, True], env=ENV) as new:
            found = reports(new, [0]) + reports(processes, [1, 2])
    assert [each[0] for each in found] == [[1, 2, 4]] * 3


def draws(ports: int, joins: bool) -> None:
    """Two epochs of samples, each of which is drawn once."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    where = {"join": f"127.0.0.1:{ports}"} if joins else {"elastic": True, "listen": f"127.0.0.1:{ports}"}
    comm.init(timeout=10.0, **where)  # type: ignore[arg-type]
    algorithm = from_spec("bytegrad", net, optimizer, on_failure="heal")
    sampler = LoadBalancingDistributedSampler(range(240), [1.0] * 240)
    sampler.follow(algorithm)
    used: dict[int, list[int]] = {0: [], 1: []}
    print("READY", flush=True)
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for sample in sampler:
            x = torch.randn(4, 12)
            optimizer.zero_grad()
            F.cross_entropy(algorithm(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            used[epoch].append(int(sample))
            time.sleep(0.02)
    print("REPORT", json.dumps([used[0], used[1], sampler.num_replicas]), flush=True)
    algorithm.close()
    comm.shutdown()


@pytest.mark.slow
@pytest.mark.processes
def test_samples_are_dealt_to_new_members() -> None:
    port = free_port()
    with Processes(draws, 2, args=[port, False], env=ENV) as processes:
        until(processes, 0, "READY")
        with Processes(draws, 1, args=[port, True], env=ENV) as new:
            found = reports(new, [0]) + reports(processes, [0, 1])
    assert {each[2] for each in found} == {3}
    for epoch in range(2):
        drawn = Counter(sample for each in found for sample in each[epoch])
        assert set(drawn) == set(range(240))
        # The last ones come again where the number of ranks does not divide theirs.
        assert sum(drawn.values()) <= 242


def test_a_stranger_is_not_admitted() -> None:
    asked: list[Any] = []
    door = Door("127.0.0.1", 0, Secret.from_text(SECRET), lambda key, value: asked.append(value))
    try:
        with pytest.raises(CommunicationError, match="does not know the secret of this rank"):
            arrive([door.address], Secret.from_text("another one"), 1.0)
        assert asked == []
    finally:
        door.close()


def test_another_version_is_refused() -> None:
    found: list[Door] = []
    door = Door(
        "127.0.0.1",
        0,
        Secret.from_text(SECRET),
        lambda key, value: found[0].answer(key, {"refused": "another version"}),
    )
    found.append(door)
    try:
        with pytest.raises(MismatchError, match="another version"):
            arrive([door.address], Secret.from_text(SECRET), limits.seconds(5.0))
    finally:
        door.close()


def test_ports_of_a_host_follow_each_other() -> None:
    first = Door("127.0.0.1", port := free_port(), Secret.from_text(SECRET), lambda key, value: None)
    second = Door("127.0.0.1", port, Secret.from_text(SECRET), lambda key, value: None)
    assert (first.address[1], second.address[1]) == (port, port + 1)
    first.close()
    second.close()
    second.close()


def test_arguments() -> None:
    with pytest.raises(ValueError, match="expected a port from 0 to 65535, or host:port, got 'nowhere'"):
        comm.init(join="nowhere")
    with pytest.raises(ValueError, match="expected host:port, or several with commas between them, got 'a:1,80'"):
        comm.init(join="a:1,80")
    with pytest.raises(ValueError, match="takes its secret: set BAGUA_KERNELS_SECRET"):
        comm.init(join="127.0.0.1:9")
    with pytest.raises(ValueError, match="expected a port from 0 to 65535, or host:port, got 'x'"):
        comm.init(elastic=True, listen="x")
    with knobs.override(knobs.SECRET, SECRET), pytest.raises(ValueError, match="drives NCCL through CuPy"):
        comm.init(join="127.0.0.1:9", device="cuda:0")
    try:
        with pytest.raises(ValueError, match="needs a secret, so that no stranger does: set BAGUA_KERNELS_SECRET"):
            comm.init(elastic=True, listen="127.0.0.1:0")
    finally:
        comm.shutdown()


def test_the_member_that_has_come_furthest_gives() -> None:
    """Others may have a step still to take, which a new one, with their parameters, would miss."""
    reports = {name: {"passes": count, "behind": False, "followers": [0]} for name, count in ((0, 5), (1, 6), (3, 6))}
    assert _furthest(Census(3, (0, 1, 3, 4), {}, reports, {4: {}})) == 1
