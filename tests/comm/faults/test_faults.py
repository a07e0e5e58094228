"""Faults that a job is given on purpose: what they do, when, and what the command reports of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.faults.fault import Fault, faults_of
from bagua_kernels.comm.faults.injector import InjectedError, Injector, planned
from bagua_kernels.comm.faults.unplugged import unplug
from bagua_kernels.comm.programs.chaos.command import happenings, main, plan
from bagua_kernels.comm.testing.processes import Processes, run_processes
from tests import limits
from tests.algorithms.test_healing import Net, step_of

LIMIT = limits.seconds(60)


def test_faults_are_read_as_they_are_written() -> None:
    text = "kill:rank=2,step=100; unplug:rank=1,after=2.5,seconds=30;stop:rank=0,at=1e9;error:rank=3,step=5,start=1"
    found = faults_of(text)
    assert found == [
        Fault("kill", 2, step=100),
        Fault("unplug", 1, after=2.5, seconds=30.0),
        Fault("stop", 0, at=1e9),
        Fault("error", 3, step=5, start=1),
    ]
    assert faults_of(";".join(map(str, found))) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("explode:rank=1,step=2", "expected one of kill"),
        ("kill:rank=1", "one moment"),
        ("kill:step=1", "needs a rank"),
        ("kill:rank=1,step=1,after=2", "one moment"),
        ("kill:rank=one,step=1", "expected a number"),
        ("kill:rank=1,step=-1", "not negative"),
        ("kill:rank=1,when=1", "'when'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        faults_of(text)


def test_moments_of_a_job_need_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count from its first process on, and a later one has those that are to come."""
    monkeypatch.setenv("BAGUA_KERNELS_FAULTS", "error:rank=0,at=0.5;error:rank=1,at=0.5;error:rank=1,at=1000")
    with pytest.raises(ValueError, match="BAGUA_KERNELS_FAULTS_FOLDER"):
        planned()
    monkeypatch.setenv("BAGUA_KERNELS_FAULTS_FOLDER", str(tmp_path))
    first = Injector(0, planned(), folder=tmp_path)
    os.utime(tmp_path / "beginning", (time.time() - 10,) * 2)
    later = Injector(1, planned(), folder=tmp_path)
    try:
        assert [each.at for _, each in later._timed] == [1000]
    finally:
        first.close()
        later.close()


def test_an_error_comes_once_at_its_step_and_start(tmp_path: Path) -> None:
    fault = Fault("error", 1, step=3)
    injector = Injector(1, [fault, Fault("kill", 0, step=2), Fault("kill", 1, step=2, start=1)], folder=tmp_path)
    try:
        for step in range(3):
            injector.reach(lambda: step)  # noqa: B023
        with pytest.raises(InjectedError, match="error:rank=1,step=3"):
            injector.reach(lambda: 3)
        injector.reach(lambda: 3)
    finally:
        injector.close()
    notes = [json.loads(line) for line in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert [each.get("step") for each in notes if "step" in each] == [0, 1, 2, 3, 3]
    assert [each["fault"] for each in notes if "fault" in each] == [str(fault)]


def test_nothing_comes_through_a_cut() -> None:
    """Bytes sent meanwhile arrive afterwards, and no new connection is made."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as near, listener.accept()[0] as far:
            cut = threading.Thread(target=unplug, args=[1.0])
            cut.start()
            time.sleep(0.1)
            near.sendall(b"late")
            far.settimeout(0.2)
            with pytest.raises(TimeoutError):
                far.recv(4)
            far.settimeout(limits.seconds(20))
            other = socket.socket()
            with other:
                other.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    other.connect(address)
            assert far.recv(4) == b"late"
            cut.join()
            near.sendall(b"then")
            assert far.recv(4) == b"then"


def trains(steps: int) -> None:
    members = comm.init(elastic=True, timeout=20.0).members
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = from_spec("bytegrad", net, optimizer, on_failure="heal")
    for step in range(steps):
        step_of(algorithm, optimizer, members.name, step)
        time.sleep(0.01)
    print("REPORT", members.ranks, flush=True)
    algorithm.close()
    comm.shutdown()


@pytest.mark.processes
def test_ranks_are_given_theirs() -> None:
    """One is killed and one has to leave, each before its step; the third one goes on."""
    faults = {"BAGUA_KERNELS_FAULTS": "kill:rank=1,step=5;notice:rank=0,step=9"}
    with Processes(trains, 3, args=[20], env=faults) as processes:
        first, second, third = processes.wait(LIMIT)
    assert (first.returncode, second.returncode, third.returncode) == (0, -signal.SIGKILL, 0)
    assert "REPORT (2,)" in third.stdout
    assert "rank 1 is given a fault: kill:rank=1,step=5" in second.stderr


def stops(steps: int) -> None:
    comm.init(timeout=20.0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = from_spec("bytegrad", net, optimizer)
    times = []
    for step in range(steps):
        step_of(algorithm, optimizer, comm.rank(), step)
        times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    print("REPORT", max(gaps) > 0.5, flush=True)
    algorithm.close()
    comm.shutdown()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "unplug"])
def test_a_pause_costs_the_wait_alone(kind: str) -> None:
    """Shorter than the timeout, it is no loss: training goes on among all."""
    faults = {"BAGUA_KERNELS_FAULTS": f"{kind}:rank=1,step=3,seconds=0.8"}
    found = run_processes(stops, 2, args=[12], env=faults, timeout=LIMIT)
    assert [each.returncode for each in found] == [0, 0], found
    assert any("REPORT True" in each.stdout for each in found)


def test_plans_come_from_the_seed() -> None:
    first, second = (plan(seed, 4, ["kill", "stop"], 10.0, 20, 5.0) for seed in (1, 2))
    assert first == plan(1, 4, ["kill", "stop"], 10.0, 20, 5.0) != second
    moments = [each.at for each in first if each.at is not None]
    assert all(5 <= after - before <= 15 for before, after in zip([0.0, *moments], moments, strict=False))
    assert {each.rank for each in first} == {0, 1, 2, 3}


def test_what_became_of_faults(tmp_path: Path) -> None:
    """By the notes of three processes, of which one was killed."""
    notes = {
        1: [{"time": 0.0, "rank": 0}, {"time": 1.0, "step": 0}, {"time": 2.0, "step": 1}, {"time": 5.0, "step": 2}],
        2: [{"time": 0.0, "rank": 1}, {"time": 1.1, "step": 0}, {"time": 2.1, "step": 1}, {"time": 5.5, "step": 2}],
        3: [{"time": 0.0, "rank": 2}, {"time": 1.0, "step": 0}, {"time": 2.5, "fault": "kill:rank=2,at=2.5"}],
    }
    for number, lines in notes.items():
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    killed, absent = happenings([Fault("kill", 2, at=2.5), Fault("kill", 2, at=4.0)], tmp_path)
    assert (killed.happened, killed.seconds) == (True, 2.5)
    assert (absent.happened, absent.seconds) == (False, None)


# Only the first start lasts until the fault comes, however slow the machine.
SCRIPT = """
import os
from tests.comm.faults.test_faults import trains
trains(50 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 1_000_000)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One agent for each rank would let survivors live; here torchrun ends them all, and starts them again."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--ranks", "2", "--every", "8", "--most", "1", "--seed", "3", "--"]
    command = [*words, *torchrun, "--max-restarts", "1", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    assert main(command, environment) == 0
    printed = capfd.readouterr().out
    assert "seed 3: 1 of 1 faults happened" in printed
    assert "the command ended with the status 0" in printed
