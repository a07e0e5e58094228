"""What the doctor knows: facts, measurements and findings, also as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from bagua_kernels.comm.joining.interfaces import GlooInterface, Interface, Network

SCHEMA = 1  # of the JSON; it grows when a field changes its meaning or goes
Level = Literal["error", "warning"]


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows about itself without asking another.

    Attributes:
        rank: its number.
        local_rank: its number on its host.
        host: the hostname.
        boot: distinguishes hosts of the same name.
        pid: of its process.
        versions: by package; empty where it is not installed.
        cuda: the version that torch was built for; empty for a CPU build.
        gpus: the GPUs that torch sees, by name.
        devices: how many the driver shows, whether or not torch sees them.
        nccl: the version of torch's NCCL; empty if there is none.
        unavailable: why it cannot use "Gloo", "NCCL" or "CuPy's NCCL", by name; without those that it can use.
        cpus: those that it may run on, by number.
        threads: how many torch uses.
        network: the interfaces, and which one Gloo takes.
        listening: the addresses that Gloo really took; empty before the ranks have joined.
        sockets: the address that this package's own sockets take; empty if there is none.
        problem: why it could not join the others or measure, or an empty text.
    """

    rank: int
    local_rank: int
    host: str
    boot: str
    pid: int
    versions: dict[str, str]
    cuda: str
    gpus: tuple[str, ...]
    devices: int
    nccl: str
    unavailable: dict[str, str]
    cpus: tuple[int, ...]
    threads: int
    network: Network
    listening: tuple[str, ...] = ()
    sockets: str = ""
    problem: str = ""

    def to_json(self) -> str:
        """Returns the facts as a line of text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RankFacts:
        """Returns what `to_json` was called on."""
        found = json.loads(text)
        network = found["network"]
        cards = tuple(Interface(**{**one, "addresses": tuple(one["addresses"])}) for one in network["interfaces"])
        whole = Network(**{**network, "interfaces": cards, "choice": GlooInterface(**network["choice"])})
        lists = {name: tuple(found[name]) for name in ("gpus", "cpus", "listening")}
        return RankFacts(**{**found, **lists, "network": whole})


@dataclass(frozen=True)
class AllReduceTime:
    """An all-reduce of one size in bytes per rank: the median time of the slowest rank, and bytes per second.

    The algorithm's bandwidth is size over seconds; the bus bandwidth, 2(n-1)/n times that, is what a link carries.
    """

    size: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class Clock:
    """Seconds by which a rank's clock is ahead of rank 0's; the truth is within `uncertainty`, however lopsided the way."""

    offset: float
    uncertainty: float


@dataclass(frozen=True)
class Measurements:
    """What the ranks measured together.

    Attributes:
        size: bytes of a message of which the bandwidth was measured.
        latency: seconds one way (half of a round trip), by rank and rank; 0 on the diagonal.
        bandwidth: bytes per second from rank to rank; 0 on the diagonal.
        all_reduce: by size, ascending.
        barrier: seconds.
        matmul: seconds of a fixed matrix product, by rank, all at once.
        copy: seconds of a fixed copy of memory, likewise.
        clocks: by rank.
        watched: True if lost ranks are named in errors.
    """

    size: int
    latency: tuple[tuple[float, ...], ...]
    bandwidth: tuple[tuple[float, ...], ...]
    all_reduce: tuple[AllReduceTime, ...]
    barrier: float
    matmul: tuple[float, ...]
    copy: tuple[float, ...]
    clocks: tuple[Clock, ...]
    watched: bool = True


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with some ranks (ascending), why that matters, and what to set.

    Its level is "error" if training will fail, hang or crawl, "warning" if it may be slow or hard to follow.
    """

    level: Level
    ranks: tuple[int, ...]
    what: str
    why: str
    what_to_set: str


@dataclass(frozen=True)
class Report:
    """Everything that the doctor knows.

    Attributes:
        world_size: the number of ranks of the job.
        device: where the tensors of the measurements were.
        ranks: the facts of the ranks that arrived.
        measured: None if nothing could be measured, or if there is one rank only.
        findings: errors first.
    """

    world_size: int
    device: str
    ranks: tuple[RankFacts, ...]
    measured: Measurements | None
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Returns True if no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> str:
        """Returns the report as JSON; docs/doctor.md describes it."""
        return json.dumps({"schema": SCHEMA, "healthy": self.healthy, **dataclasses.asdict(self)}, indent=2)
