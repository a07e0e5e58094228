"""What the doctor reports: facts, measurements and findings as tables for a reader."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from bagua_kernels.comm.programs.doctor.facts import Measurements, RankFacts, Report

_LARGEST_MATRIX = 16  # ranks; beyond that only the slowest links are shown
_SLOWEST = 12

BACKENDS = ("Gloo", "NCCL", "CuPy's NCCL")


@dataclass(frozen=True)
class ReportTable:
    """A part of the report as text: a heading, the heads of the columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(report: Report) -> list[ReportTable]:
    """Returns the report as tables: ranks, versions, links, collectives, ranks' speed and clocks, findings."""
    found = [_ranks(report.ranks), _versions(report.ranks)]
    if report.measured is not None:
        found += [*_links(report.measured), _collectives(report.measured), _speed(report.measured)]
    rows = tuple((one.level, _list(one.ranks), one.what, one.why, one.what_to_set) for one in report.findings)
    if rows:
        found.append(ReportTable("Findings", ("level", "ranks", "what", "why", "what to set"), rows))
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
    file.write(f"{_summary(report)}\n")
    file.flush()


def plain(table: ReportTable) -> str:
    """Returns a table as lines of text."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, "", ""])


def _summary(report: Report) -> str:
    errors = sum(finding.level == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    if not report.findings:
        return f"Nothing is wrong with the {report.world_size} rank(s)."
    return f"{errors} error(s), {warnings} warning(s) among {report.world_size} rank(s)."


def _ranks(ranks: Sequence[RankFacts]) -> ReportTable:
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
    return ReportTable("Ranks", (*columns, *more), tuple(rows))


def _versions(ranks: Sequence[RankFacts]) -> ReportTable:
    """One row for all ranks that have the same."""
    groups: dict[tuple[str, ...], list[int]] = {}
    names = tuple(ranks[0].versions) if ranks else ()
    for facts in ranks:
        cells = tuple(facts.versions.get(name) or "-" for name in names)
        gloo, nccl, cupy = (facts.unavailable.get(name, "yes") for name in BACKENDS)
        groups.setdefault((*cells, gloo, facts.nccl or nccl, cupy), []).append(facts.rank)
    rows = tuple((_list(members), *cells) for cells, members in groups.items())
    return ReportTable("Versions", ("ranks", *names, *BACKENDS), rows)


def _links(measured: Measurements) -> list[ReportTable]:
    everyone = range(len(measured.latency))
    bandwidth = f"Bandwidth of {_bytes(measured.size)} from row to column, Mbit/s"
    found = []
    kinds = (("Latency one way, µs", measured.latency, _micro), (bandwidth, measured.bandwidth, _mega))
    for title, matrix, text in kinds:
        if len(everyone) <= _LARGEST_MATRIX:
            rows = [(str(a), *("-" if a == b else text(matrix[a][b]) for b in everyone)) for a in everyone]
            found.append(ReportTable(title, ("rank", *map(str, everyone)), tuple(rows)))
        else:
            links = sorted((matrix[a][b], a, b) for a in everyone for b in everyone if a != b)
            slowest = (links[::-1] if text is _micro else links)[:_SLOWEST]
            rows = [(f"{a} -> {b}", text(value)) for value, a, b in slowest]
            found.append(ReportTable(f"{title}: the slowest of {len(links)}", ("link", "value"), tuple(rows)))
    return found


def _collectives(measured: Measurements) -> ReportTable:
    rows = [("barrier", _micro(measured.barrier), "-", "-")]
    for one in measured.all_reduce:
        rates = (_mega(one.algorithm_bandwidth), _mega(one.bus_bandwidth))
        rows.append((f"all-reduce of {_bytes(one.size)}", _micro(one.seconds), *rates))
    return ReportTable("Collectives", ("operation", "µs", "algorithm Mbit/s", "bus Mbit/s"), tuple(rows))


def _speed(measured: Measurements) -> ReportTable:
    rows = []
    for rank, (matmul, copy) in enumerate(zip(measured.matmul, measured.copy, strict=True)):
        clock = measured.clocks[rank]
        ahead = f"{clock.offset * 1e3:+.3f} ± {clock.uncertainty * 1e3:.3f}"
        rows.append((str(rank), _micro(matmul), _micro(copy), ahead))
    columns = ("rank", "matrix product, µs", "copy, µs", "clock ahead of rank 0, ms")
    return ReportTable("Speed and clocks", columns, tuple(rows))


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _mega(rate: float) -> str:
    """Returns bytes per second as megabits per second."""
    return f"{rate * 8e-6:.1f}" if rate < 12.5e6 else f"{rate * 8e-6:.0f}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "all"


def _bytes(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"
