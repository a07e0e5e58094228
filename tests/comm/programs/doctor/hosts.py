"""Made-up facts of ranks and hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua_kernels.comm.joining.interfaces import GlooInterface, Interface, Network
from bagua_kernels.comm.programs.doctor.facts import AllReduceTime, Clock, Measurements, RankFacts

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
