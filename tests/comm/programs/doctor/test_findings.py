"""What the doctor finds in made-up facts."""

from __future__ import annotations

import itertools
from dataclasses import replace

from bagua_kernels.comm.joining.interfaces import GlooInterface, Interface
from bagua_kernels.comm.programs.doctor.facts import Clock, Measurements, RankFacts
from bagua_kernels.comm.programs.doctor.findings import diagnose
from tests.comm.programs.doctor.hosts import facts, gpu_host, hosts, matrix, measured, network, one_host
from tests.grids import folded, grid

SLOW_RANK = {f"l{a}_{b}": 1e8 for a, b in itertools.permutations(range(4), 2) if 2 in (a, b)}

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
    "unwatched": (hosts(), measured(watched=False), "warning", (0,), "heartbeat store", "set MASTER_ADDR"),
}


@folded(name=list(RULES))
def test_rule(name: str) -> None:
    """Each finding appears, for the ranks concerned, and it is the only kind that does."""
    ranks, measurements, level, concerned, what, fix = RULES[name]
    found = diagnose(len(ranks), ranks, measurements)
    matching = [one for one in found if what in one.what]
    assert [(one.level, one.ranks) for one in matching] == [(level, concerned)], found
    assert fix in matching[0].what_to_set
    assert {one.what_to_set for one in found} == {matching[0].what_to_set}


@grid(
    cover=1,
    ranks__measurements=[
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


def test_a_rank_alone_has_no_way_to_others() -> None:
    """Nothing is sent, so that nothing goes over the wrong interface; with a rank that has not come it would."""
    ranks = [facts(0, sockets="192.168.7.2", listening=("127.0.0.1",))]
    assert diagnose(1, ranks) == ()
    assert len([one for one in diagnose(2, ranks, None, [1]) if one.level == "warning"]) == 2


def test_missing_ranks_and_order() -> None:
    """A rank that did not come is an error, and errors come first."""
    ranks = hosts(3, odd=1, versions={**facts(1).versions, "numba": "0.60"})
    found = diagnose(4, ranks, None, [3])
    assert [(one.level, one.ranks) for one in found] == [("error", (3,)), ("warning", (1,))]
    assert "rank 3 did not join" in found[0].what
