"""The doctor: what it measures among threads, what it reports, and a whole run of processes."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.joining.interfaces import GlooInterface, Interface
from bagua_kernels.comm.programs.doctor import command as doctor
from bagua_kernels.comm.programs.doctor import report as doctor_report
from bagua_kernels.comm.programs.doctor.facts import SCHEMA, Finding, RankFacts, Report
from bagua_kernels.comm.programs.doctor.measure import collect, estimate_clock, measure, tournament
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.comm.programs.doctor.hosts import DOCKER, LO, facts, gpu_host, hosts, matrix, measured, network
from tests.grids import grid

MASTER = {"MASTER_ADDR": "127.0.0.1"}


@grid(cover=1, size=range(1, 10))
def test_tournament(size: int) -> None:
    """Every two ranks meet once, no rank twice in a round, in as few rounds as can be."""
    rounds = tournament(size)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(size), 2))
    for pairs in rounds:
        ranks = list(itertools.chain(*pairs))
        assert len(set(ranks)) == len(ranks)
    assert len(rounds) == (size if size % 2 else size - 1)


@pytest.mark.parametrize("offset", [0.0, 0.2, -3.0])
def test_clock(offset: float) -> None:
    """The estimate is right within its uncertainty, however lopsided the way is."""
    noise = random.Random(7)
    for lopsided in (0.0, 0.9):
        samples = []
        for _ in range(30):
            there, back = 0.001 + noise.expovariate(100), 0.001 + noise.expovariate(100) * (1 - lopsided)
            sent = noise.uniform(0, 100)
            answered = sent + there + 0.0005
            samples.append((sent, sent + there + offset, answered + offset, answered + back))
        clock = estimate_clock(samples)
        assert abs(clock.offset - offset) <= clock.uncertainty + 1e-9
        assert clock.uncertainty < 0.005


@pytest.mark.parametrize("size", [1, 3, 4])
def test_measure(size: int) -> None:
    """Every rank gets the same complete measurements."""
    results = run_ranks(size, measure, 4096, True)
    found = results[0]
    assert results == [found] * size
    for table in (found.latency, found.bandwidth):
        assert [len(row) for row in table] == [size] * size
        assert all((table[a][b] > 0) is (a != b) for a in range(size) for b in range(size))
    assert [one.size for one in found.all_reduce] == [4, 256, 4096]
    for one in found.all_reduce:
        assert one.bus_bandwidth == pytest.approx(one.algorithm_bandwidth * 2 * (size - 1) / size)
    assert len(found.matmul) == len(found.copy) == len(found.clocks) == size
    assert all(abs(clock.offset) <= clock.uncertainty + 1e-3 for clock in found.clocks)
    assert found.watched


def test_choice_of_interface() -> None:
    """What decides which interface Gloo takes, in the order of precedence."""
    found = network(0).interfaces
    elsewhere = {"MASTER_ADDR": "10.0.0.9"}

    def resolve_to(*addresses: str) -> Any:
        return lambda: ("me", addresses)

    assert interfaces.choose(found, {"GLOO_SOCKET_IFNAME": "docker0", **MASTER}) == GlooInterface(
        "docker0", "172.17.0.1", "GLOO_SOCKET_IFNAME"
    )
    assert (
        "no interface eth7, only lo, docker0, eth0" in interfaces.choose(found, {"GLOO_SOCKET_IFNAME": "eth7"}).problem
    )
    down = (LO, Interface("eth0", ("10.0.0.1/24",), state="down"))
    assert interfaces.choose(down, {"GLOO_SOCKET_IFNAME": "eth0"}).problem == "eth0 is down"
    assert interfaces.choose(found, MASTER) == GlooInterface("lo", "127.0.0.1", "MASTER_ADDR")
    assert interfaces.choose(found, {"MASTER_ADDR": "localhost"}) == GlooInterface("lo", "127.0.0.1", "MASTER_ADDR")
    debian = interfaces.choose(found, elsewhere, resolve_to("127.0.1.1", "10.0.0.1"))
    assert debian == GlooInterface("lo", "127.0.1.1", "hostname")
    named = interfaces.choose(found, elsewhere, resolve_to("8.8.8.8", "10.0.0.1"))
    assert named == GlooInterface("eth0", "10.0.0.1", "hostname")
    lost = interfaces.choose(found, elsewhere, resolve_to())
    assert (lost.name, lost.reason, lost.problem) == ("lo", "fallback", "the hostname me does not resolve")


def test_interfaces_of_this_host() -> None:
    """Loopback is there with its address, and an address that is listened on is seen."""
    loopback = next(one for one in interfaces.interfaces() if one.is_loopback)
    assert "127.0.0.1/8" in loopback.addresses
    assert not loopback.leads_out
    assert loopback.mtu > 0
    with socket.socket() as server:
        server.bind(("127.0.0.9", 0))
        server.listen()
        assert "127.0.0.9" in interfaces.listening()
    assert "127.0.0.9" not in interfaces.listening()
    assert network(0).best == "eth0"
    assert network(0, towards_master="", interfaces=(LO, DOCKER)).best == ""


def test_facts_travel_as_data() -> None:
    """What is read from the store is the same, and cannot run anything."""
    for one in (facts(3, sockets="10.0.0.4", problem="no way"), gpu_host()[1], collect(5, 1)):
        assert RankFacts.from_json(one.to_json()) == one
    store = HashStore()
    store.set("facts", pickle.dumps(facts(0)).hex())
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        doctor._facts(store, "facts")


def test_report() -> None:
    """The findings are in the tables, by rich and without, and in the JSON."""
    finding = Finding("error", (3,), "rank 3 uses [docker0]", "because", "set GLOO_SOCKET_IFNAME=eth0")
    report = Report(4, "cpu", tuple(hosts()), measured(), (finding,))
    file = io.StringIO()
    doctor_report.show(report, file)
    assert "[docker0]" in file.getvalue()
    assert "1 error(s), 0 warning(s) among 4 rank(s)" in file.getvalue()
    text = "".join(doctor_report.plain(table) for table in doctor_report.tables(report))
    for part in (finding.what, finding.what_to_set, "10.0.0.4", "all-reduce of 1 MiB", "8000", "host2"):
        assert part in text
    parsed = json.loads(report.to_json())
    assert (parsed["schema"], parsed["healthy"], parsed["findings"][0]["ranks"]) == (SCHEMA, False, [3])
    assert replace(report, findings=(replace(finding, level="warning"),)).healthy
    large = Report(20, "cpu", tuple(hosts(20)), measured(20, bandwidth=matrix(20, 1e9, l7_3=1e6)), ())
    (slowest,) = [table.rows[0] for table in doctor_report.tables(large) if "Bandwidth" in table.title]
    assert slowest == ("7 -> 3", "8.0")


def test_report_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain text, and a word about rich."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    file = io.StringIO()
    doctor_report.show(Report(1, "cpu", (facts(0),), None, ()), file)
    assert "10.0.0.1" in file.getvalue()
    assert "pip install rich" in file.getvalue()
    assert "Nothing is wrong" in file.getvalue()


def test_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a launcher: the facts of this process, none missing."""
    for name in ("RANK", "WORLD_SIZE", *interfaces.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "report.json"
    assert doctor.main(["--json", str(path)]) == 0
    assert "Ranks" in capsys.readouterr().out
    assert json.loads(path.read_text())["ranks"][0]["versions"]["torch"] == collect().versions["torch"]
    assert doctor.main(["--json", str(tmp_path / "nowhere" / "report.json")]) == 1
    assert "cannot be written" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setenv("RANK", "0")
    assert doctor.main([]) == 1
    assert "lacks WORLD_SIZE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--timeout", "0"])


def run_doctor(*arguments: str) -> None:
    sys.exit(doctor.main(arguments))


def test_two_processes(tmp_path: Path) -> None:
    """A whole run, whose JSON is complete."""
    path = tmp_path / "report.json"
    results = run_processes(run_doctor, 2, args=["--quick", "--json", str(path), "--timeout", "30"])
    assert [result.returncode for result in results] == [0, 0], results
    assert "Latency" in results[0].stdout
    assert results[1].stdout == ""
    report = json.loads(path.read_text())
    assert report["schema"] == SCHEMA
    assert report["world_size"] == 2
    assert [one["rank"] for one in report["ranks"]] == [0, 1]
    assert [one["listening"] for one in report["ranks"]] == [["127.0.0.1"]] * 2
    found = report["measured"]
    assert found["bandwidth"][0][1] > 0 < found["bandwidth"][1][0]
    assert found["latency"][0][1] > 0
    assert len(found["clocks"]) == len(found["matmul"]) == 2
    assert found["watched"]
    assert not [one for one in report["findings"] if one["level"] == "error"]


@pytest.mark.slow
def test_missing_process(tmp_path: Path) -> None:
    """A rank that never starts is named, soon."""
    path = tmp_path / "report.json"
    arguments = ["--quick", "--json", str(path), "--timeout", "1"]
    (result,) = run_processes(run_doctor, 1, args=arguments, env={"WORLD_SIZE": "2"}, timeout=limits.seconds(30))
    assert result.returncode == 1, result
    assert "rank 1 did not join" in result.stdout
    assert [one["ranks"] for one in json.loads(path.read_text())["findings"]] == [[1]]


@pytest.mark.slow
def test_import_leaves_the_doctor_alone() -> None:
    """A program that only communicates loads none of it."""
    program = "import sys, bagua_kernels.comm; print([n for n in sys.modules if 'doctor' in n])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=limits.seconds(60), check=True
    )
    assert result.stdout.strip() == "[]"
