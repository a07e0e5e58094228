"""The doctor: what it finds in made-up facts, what it measures among threads, and a whole run of processes."""

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
from bagua_kernels.comm.doctor import command as doctor
from bagua_kernels.comm.doctor import report as doctor_report
from bagua_kernels.comm.doctor.facts import SCHEMA, AllReduceTime, Clock, Finding, Measurements, RankFacts, Report
from bagua_kernels.comm.doctor.findings import diagnose
from bagua_kernels.comm.doctor.measure import collect, estimate_clock, measure, tournament
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.joining.interfaces import GlooInterface, Interface, Network
from bagua_kernels.comm.testing import run_processes

LO = Interface("lo", ("127.0.0.1/8", "::1/128"), 65536)
DOCKER = Interface("docker0", ("172.17.0.1/16",), 1500, 0, "up")


def network(rank: int, used: str = "eth0", reason: str = "hostname", problem: str = "", **changes: Any) -> Network:
    eth = Interface("eth0", (f"10.0.0.{rank + 1}/24",), 1500, 10_000, "up")
    found = {one.name: one for one in (LO, DOCKER, eth)}
    address = found[used].addresses[0].split("/")[0] if used in found else ""
    whole = Network(
        tuple(found.values()), GlooInterface(used, address, reason, problem), "eth0", "cubic", 6 << 20, 4 << 20
    )
    return replace(whole, **changes)


def facts(rank: int, **changes: Any) -> RankFacts:
    """A healthy rank, alone on its host."""
    healthy = RankFacts(
        rank=rank,
        local_rank=0,
        host=f"host{rank}",
        boot=f"boot{rank}",
        pid=100 + rank,
        versions={"python": "3.11.7", "torch": "2.13.0", "numba": "0.61", "cupy": ""},
        cuda="",
        gpus=(),
        devices=0,
        nccl="",
        unavailable={"NCCL": "torch is built without CUDA", "CuPy's NCCL": "CuPy is not installed"},
        cpus=tuple(range(8)),
        threads=8,
        network=network(rank),
        listening=(f"10.0.0.{rank + 1}",),
    )
    return replace(healthy, **changes)


def hosts(size: int = 4, odd: int | None = None, **changes: Any) -> list[RankFacts]:
    """Healthy ranks on hosts of their own, but one."""
    return [facts(rank, **(changes if rank == odd else {})) for rank in range(size)]


def one_host(size: int = 4, **changes: Any) -> list[RankFacts]:
    return [
        facts(rank, **{"local_rank": rank, "host": "h", "boot": "b", "threads": 2, **changes}) for rank in range(size)
    ]


def gpu_host(size: int = 2, **changes: Any) -> list[RankFacts]:
    gpus = {"gpus": ("H200", "H200"), "devices": 2, "cuda": "13.0", "nccl": "2.28", "unavailable": {}}
    return one_host(size, **{**gpus, **changes})


def matrix(size: int, value: float, **other: float) -> tuple[tuple[float, ...], ...]:
    """All links alike, save those called l<from>_<to>."""
    return tuple(tuple(0.0 if a == b else other.get(f"l{a}_{b}", value) for b in range(size)) for a in range(size))


def measured(size: int = 4, **changes: Any) -> Measurements:
    healthy = Measurements(
        size=1 << 20,
        latency=matrix(size, 50e-6),
        bandwidth=matrix(size, 1e9),
        all_reduce=(AllReduceTime(1 << 20, 0.001, 1e9, 1.5e9),),
        barrier=1e-4,
        matmul=(1e-3,) * size,
        copy=(1e-3,) * size,
        clocks=(Clock(0.0, 0.0),) * size,
    )
    return replace(healthy, **changes)


SLOW_RANK = {f"l{a}_{b}": 1e8 for a, b in itertools.permutations(range(4), 2) if 2 in (a, b)}
MASTER = {"MASTER_ADDR": "127.0.0.1"}

# What is odd; then level, ranks, a part of what is found, and a part of what to set.
RULES: dict[str, tuple[list[RankFacts], Measurements | None, str, tuple[int, ...], str, str]] = {
    "docker": (
        *(hosts(odd=3, network=network(3, "docker0"), listening=()), None, "error", (3,)),
        *("rank 3 uses docker0 (172.17.0.1)", "set GLOO_SOCKET_IFNAME=eth0"),
    ),
    "debian": (
        *(
            hosts(
                odd=1, network=replace(network(1), choice=GlooInterface("lo", "127.0.1.1", "hostname")), listening=()
            ),
            None,
        ),
        *("error", (1,), "the hostname host1 resolves to it", "set GLOO_SOCKET_IFNAME=eth0, or let host1 resolve"),
    ),
    "loopback master": (
        *([facts(r, network=network(r, "lo", "MASTER_ADDR"), listening=()) for r in range(2)], None, "error", (0,)),
        *("rank 0 uses lo", "set MASTER_ADDR to an address of rank 0's host"),
    ),
    "unresolved": (
        *(hosts(odd=2, network=network(2, "lo", "fallback", "the hostname x does not resolve"), listening=()), None),
        *("error", (2,), "the hostname x does not resolve", "set GLOO_SOCKET_IFNAME=eth0"),
    ),
    "no such interface": (
        *(hosts(odd=0, network=network(0, "eth9", "GLOO_SOCKET_IFNAME", "no eth9"), listening=()), None, "error", (0,)),
        *("GLOO_SOCKET_IFNAME=eth9 cannot be used", "set GLOO_SOCKET_IFNAME=eth0"),
    ),
    "elsewhere": (
        *(hosts(odd=1, listening=("10.0.0.2", "127.0.0.1")), None, "error", (1,)),
        *("rank 1 takes 127.0.0.1", "let the hostname host1 resolve to 10.0.0.2"),
    ),
    "elsewhere than where it should not be": (
        *(hosts(odd=1, network=network(1, "docker0"), listening=("10.0.0.2", "172.17.0.1")), None, "error", (1,)),
        *("rank 1 uses docker0", "set GLOO_SOCKET_IFNAME=eth0"),
    ),
    "two addresses": (
        *(hosts(odd=1, sockets="192.168.7.2"), None, "warning", (1,)),
        *("rank 1: Gloo takes 10.0.0.2, this package's own sockets 192.168.7.2", "set GLOO_SOCKET_IFNAME=eth0"),
    ),
    "subnet": (
        *(
            hosts(odd=3, network=network(3, interfaces=(Interface("eth0", ("10.0.0.4/28",), 1500, 10_000, "up"),))),
            None,
        ),
        *("warning", (3,), "10.0.0.0/28", "set GLOO_SOCKET_IFNAME"),
    ),
    "torch": (
        *(hosts(odd=2, versions={**facts(2).versions, "torch": "2.6.0"}), None, "error", (2,)),
        *("torch differs: 2.13.0 on ranks 0, 1, 3; 2.6.0 on rank 2", "install the same version of torch"),
    ),
    "numba": (
        *(hosts(odd=0, versions={**facts(0).versions, "numba": ""}), None, "warning", (0,)),
        *("none on rank 0", "install the same version of numba"),
    ),
    "cupy": (
        *(hosts(odd=0, versions={**facts(0).versions, "cupy": "13.6"}), None, "warning", (0,)),
        *("cupy differs", "install the same version of cupy"),
    ),
    "mtu": (
        *(
            hosts(odd=1, network=network(1, interfaces=(Interface("eth0", ("10.0.0.2/24",), 9000, 10_000, "up"),))),
            None,
        ),
        *("warning", (0, 1, 2, 3), "9000 on rank 1", "mtu 1500"),
    ),
    "threads": (
        *(one_host(threads=8), None, "warning", (0, 1, 2, 3)),
        *("32 threads on 8 CPUs; OMP_NUM_THREADS is not set for ranks 0, 1, 2, 3", "OMP_NUM_THREADS=2"),
    ),
    "too many ranks": (
        *(one_host(threads=1, cpus=(0, 1)), None, "warning", (0, 1, 2, 3), "4 threads on 2 CPUs", "at most 2 ranks"),
    ),
    "too few GPUs": (gpu_host(3), None, "error", (0, 1, 2), "2 GPU(s) for 3 ranks", "--nproc-per-node 2"),
    "no NCCL": (
        *(
            gpu_host(unavailable={"NCCL": "no NCCL in it"}),
            None,
            "error",
            (0, 1),
            "no NCCL in it",
            "install torch with NCCL",
        ),
    ),
    "no CuPy": (
        *(gpu_host(unavailable={"CuPy's NCCL": "CuPy is not installed"}), None, "warning", (0, 1)),
        *("CuPy is not installed", "pip install cupy-cuda13x nvidia-nccl-cu13"),
    ),
    "CPU build": (
        *(gpu_host(gpus=(), cuda=""), None, "warning", (0, 1), "torch sees none", "install torch's build for CUDA"),
    ),
    "no Gloo": (hosts(odd=0, unavailable={"Gloo": "no Gloo"}), None, "error", (0,), "Gloo is missing", "install torch"),
    "failed": (
        hosts(odd=1, problem="it broke"),
        None,
        "error",
        (1,),
        "rank 1 failed: it broke",
        "let all ports through",
    ),
    "slow link": (
        *(hosts(), measured(bandwidth=matrix(4, 1e9, l1_2=1e8)), "warning", (1, 2)),
        *("from rank 1 to rank 2 between hosts carries 800 Mbit/s", "ethtool"),
    ),
    "slow rank": (
        *(hosts(), measured(bandwidth=matrix(4, 1e9, **SLOW_RANK)), "warning", (2,)),
        *("most links of rank 2 between hosts are slow", "ethtool"),
    ),
    "slow within a host": (
        *(one_host(), measured(bandwidth=matrix(4, 1e9, **SLOW_RANK)), "warning", (2,)),
        *("most links of rank 2 within the host", "taskset"),
    ),
    "straggler": (
        *(hosts(), measured(matmul=(1e-3, 1e-3, 1e-3, 3e-3)), "warning", (3,)),
        *("rank 3 took 3.0 times", "other processes"),
    ),
    "slow memory": (hosts(), measured(copy=(2e-3, 1e-3, 1e-3, 1e-3)), "warning", (0,), "copy of memory", "OMP_NUM"),
    "clock": (
        *(hosts(), measured(clocks=(Clock(0, 0), Clock(-0.5, 0.01), Clock(0, 0), Clock(0.105, 0.01))), "warning", (1,)),
        *("rank 1's clock is -0.500 s", "chrony"),
    ),
    "window": (
        *(hosts(), measured(latency=matrix(4, 0.02, l0_1=0.05, l1_0=0.05)), "warning", (0, 1, 2, 3)),
        *("125.0 MB", 'net.ipv4.tcp_rmem="4096 131072 268435456"'),
    ),
    "unwatched": (hosts(), measured(watched=False), "warning", (0,), "signs of life", "set MASTER_ADDR"),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    """Each finding appears, for the ranks concerned, and it is the only kind that does."""
    ranks, measurements, level, concerned, what, fix = RULES[name]
    found = diagnose(len(ranks), ranks, measurements)
    matching = [one for one in found if what in one.what]
    assert [(one.level, one.ranks) for one in matching] == [(level, concerned)], found
    assert fix in matching[0].what_to_set
    assert {one.what_to_set for one in found} == {matching[0].what_to_set}


@pytest.mark.parametrize(
    ("ranks", "measurements"),
    [
        (hosts(), None),
        (hosts(), measured()),
        (one_host(), measured()),
        ([facts(rank, sockets=f"10.0.0.{rank + 1}") for rank in range(2)], None),
        (gpu_host(), measured(2)),
        (hosts(2), measured(2)),
        ([facts(0)], None),
        # Pinned to CPUs of their own.
        ([replace(one, threads=4, cpus=tuple(range(4 * one.rank, 4 * one.rank + 4))) for one in one_host(2)], None),
        # On one host, every interface leads to everybody.
        (one_host(network=network(0, "lo", "MASTER_ADDR"), listening=("127.0.0.1",)), measured()),
        # Links within a host are not held against those between hosts.
        (one_host(2) + hosts(4)[2:], measured(bandwidth=matrix(4, 1e9, l0_1=1e11, l1_0=1e11))),
        # A clock so far off that it may as well not be.
        (hosts(2), measured(2, clocks=(Clock(0, 0), Clock(0.3, 0.25)))),
    ],
)
def test_healthy(ranks: list[RankFacts], measurements: Measurements | None) -> None:
    """Nothing is found where nothing is wrong."""
    assert diagnose(len(ranks), ranks, measurements) == ()


def test_missing_ranks_and_order() -> None:
    """A rank that did not come is an error, and errors come first."""
    ranks = hosts(3, odd=1, versions={**facts(1).versions, "numba": "0.60"})
    found = diagnose(4, ranks, None, [3])
    assert [(one.level, one.ranks) for one in found] == [("error", (3,)), ("warning", (1,))]
    assert "rank 3 did not join" in found[0].what


@pytest.mark.parametrize("size", range(1, 10))
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


def test_missing_process(tmp_path: Path) -> None:
    """A rank that never starts is named, soon."""
    path = tmp_path / "report.json"
    arguments = ["--quick", "--json", str(path), "--timeout", "1"]
    (result,) = run_processes(run_doctor, 1, args=arguments, env={"WORLD_SIZE": "2"}, timeout=30)
    assert result.returncode == 1, result
    assert "rank 1 did not join" in result.stdout
    assert [one["ranks"] for one in json.loads(path.read_text())["findings"]] == [[1]]


def test_import_leaves_the_doctor_alone() -> None:
    """A program that only communicates loads none of it."""
    program = "import sys, bagua_kernels.comm; print([n for n in sys.modules if 'doctor' in n or 'interfaces' in n])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
