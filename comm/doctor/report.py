"""What the doctor reports: facts, measurements and findings, as JSON and as tables for a reader."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal

from bagua_kernels.comm.joining.interfaces import Choice, Interface, Network

SCHEMA = 1  # of the JSON; it grows when a field changes its meaning or goes
_LARGEST_MATRIX = 16  # ranks; beyond that only the slowest links are shown
_SLOWEST = 12

BACKENDS = ("Gloo", "NCCL", "CuPy's NCCL")
Level = Literal["error", "warning"]


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows about itself without asking another.

    Attributes:
        rank: its number.
        local_rank: its number on its host.
        host: the hostname.
        boot: tells hosts of the same name apart.
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
        whole = Network(**{**network, "interfaces": cards, "choice": Choice(**network["choice"])})
        lists = {name: tuple(found[name]) for name in ("gpus", "cpus", "listening")}
        return RankFacts(**{**found, **lists, "network": whole})


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of one size in bytes a rank: the median time of the slowest rank, and bytes a second.

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
        bandwidth: bytes a second from rank to rank; 0 on the diagonal.
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
    all_reduce: tuple[AllReduce, ...]
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


@dataclass(frozen=True)
class Table:
    """A part of the report as text: a heading, the heads of the columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(report: Report) -> list[Table]:
    """Returns the report as tables: ranks, versions, links, collectives, ranks' speed and clocks, findings."""
    found = [_ranks(report.ranks), _versions(report.ranks)]
    if report.measured is not None:
        found += [*_links(report.measured), _collectives(report.measured), _speed(report.measured)]
    rows = tuple((one.level, _list(one.ranks), one.what, one.why, one.what_to_set) for one in report.findings)
    if rows:
        found.append(Table("Findings", ("level", "ranks", "what", "why", "what to set"), rows))
    return found


def show(report: Report, file: IO[str]) -> None:
    """Prints the tables, by rich where it is installed and as plain text where not."""
    # A log file has no width of its own.
    width = max(100, shutil.get_terminal_size((120, 24)).columns) if file.isatty() else 140
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        for table in tables(report):
            file.write(plain(table))
        file.write("install rich for tables that fit the screen: pip install rich\n")
    else:
        console = Console(file=file, width=width, highlight=False)
        for table in tables(report):
            lines = table.title == "Findings"
            drawn = RichTable(*table.columns, title=table.title, title_justify="left", show_lines=lines)
            for row in table.rows:
                style = {"error": "red", "warning": "yellow"}.get(row[0], "")
                # Text, for a cell such as [0] is no markup.
                drawn.add_row(Text(row[0], style=style), *map(Text, row[1:]))
            console.print(drawn)
    file.write(f"{_verdict(report)}\n")
    file.flush()


def plain(table: Table) -> str:
    """Returns a table as lines of text."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, "", ""])


def _verdict(report: Report) -> str:
    errors = sum(finding.level == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    if not report.findings:
        return f"Nothing is wrong with the {report.world_size} rank(s)."
    return f"{errors} error(s), {warnings} warning(s) among {report.world_size} rank(s)."


def _ranks(ranks: Sequence[RankFacts]) -> Table:
    columns = ("rank", "host", "local", "pid", "interface", "address", "because of", "MTU", "Mbit/s", "state")
    more = ("others", "TCP", "threads/CPUs", "GPU")
    rows = []
    for facts in ranks:
        network, used = facts.network, facts.network.used
        others = [interface.name for interface in network.interfaces if interface.leads_out and interface != used]
        own = facts.local_rank < len(facts.gpus)
        rows.append(
            (
                *(str(facts.rank), facts.host, str(facts.local_rank), str(facts.pid)),
                *(used.name or "?", ", ".join(facts.listening) or network.choice.address, network.choice.reason),
                *(str(used.mtu or "?"), str(used.speed or "?"), used.state, " ".join(others) or "-"),
                *(network.congestion or "?", f"{facts.threads}/{len(facts.cpus)}"),
                facts.gpus[facts.local_rank] if own else "-",
            )
        )
    return Table("Ranks", (*columns, *more), tuple(rows))


def _versions(ranks: Sequence[RankFacts]) -> Table:
    """One row for all ranks that have the same."""
    groups: dict[tuple[str, ...], list[int]] = {}
    names = tuple(ranks[0].versions) if ranks else ()
    for facts in ranks:
        cells = tuple(facts.versions.get(name) or "-" for name in names)
        gloo, nccl, cupy = (facts.unavailable.get(name, "yes") for name in BACKENDS)
        groups.setdefault((*cells, gloo, facts.nccl or nccl, cupy), []).append(facts.rank)
    rows = tuple((_list(members), *cells) for cells, members in groups.items())
    return Table("Versions", ("ranks", *names, *BACKENDS), rows)


def _links(measured: Measurements) -> list[Table]:
    everyone = range(len(measured.latency))
    bandwidth = f"Bandwidth of {_bytes(measured.size)} from row to column, Mbit/s"
    found = []
    kinds = (("Latency one way, µs", measured.latency, _micro), (bandwidth, measured.bandwidth, _mega))
    for title, matrix, text in kinds:
        if len(everyone) <= _LARGEST_MATRIX:
            rows = [(str(a), *("-" if a == b else text(matrix[a][b]) for b in everyone)) for a in everyone]
            found.append(Table(title, ("rank", *map(str, everyone)), tuple(rows)))
        else:
            links = sorted((matrix[a][b], a, b) for a in everyone for b in everyone if a != b)
            slowest = (links[::-1] if text is _micro else links)[:_SLOWEST]
            rows = [(f"{a} -> {b}", text(value)) for value, a, b in slowest]
            found.append(Table(f"{title}: the slowest of {len(links)}", ("link", "value"), tuple(rows)))
    return found


def _collectives(measured: Measurements) -> Table:
    rows = [("barrier", _micro(measured.barrier), "-", "-")]
    for one in measured.all_reduce:
        rates = (_mega(one.algorithm_bandwidth), _mega(one.bus_bandwidth))
        rows.append((f"all-reduce of {_bytes(one.size)}", _micro(one.seconds), *rates))
    return Table("Collectives", ("operation", "µs", "algorithm Mbit/s", "bus Mbit/s"), tuple(rows))


def _speed(measured: Measurements) -> Table:
    rows = []
    for rank, (matmul, copy) in enumerate(zip(measured.matmul, measured.copy, strict=True)):
        clock = measured.clocks[rank]
        ahead = f"{clock.offset * 1e3:+.3f} ± {clock.uncertainty * 1e3:.3f}"
        rows.append((str(rank), _micro(matmul), _micro(copy), ahead))
    columns = ("rank", "matrix product, µs", "copy, µs", "clock ahead of rank 0, ms")
    return Table("Speed and clocks", columns, tuple(rows))


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _mega(rate: float) -> str:
    """Returns bytes a second as megabits a second."""
    return f"{rate * 8e-6:.1f}" if rate < 12.5e6 else f"{rate * 8e-6:.0f}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "all"


def _bytes(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"
