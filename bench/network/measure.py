"""Collectives on emulated hosts: against Gloo, against what the wire allows, and the bytes that leave a host.

python -m bench.network [--only large,delayed,lossy,bytes,grid] [--output bench/results/network.json]

Needs Linux and root: hosts are network namespaces with links of limited rate and delay (`bench/netlab/lab.py`). All that is
compared takes turns in one run, in random order; a time is the median over rounds of the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms.choosing.cost.facts import FRAME
from bench.netlab import lab as netlab
from bench.network.parts import run_parts

_ROOT = Path(__file__).resolve().parents[2]
_MEGA = 1 << 20
_CODECS = {"minmax_uint8": 0.26, "absmax_int8": 0.26, "absmax_int4": 0.14, "sign": 0.04}


def run(
    lab: netlab.Lab, cases: list[dict[str, Any]], budget: float, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """Runs cases on one rank a host, after tuning for about `budget` seconds."""
    command = [sys.executable, "-m", "bench.network.rank", json.dumps({"cases": cases, "budget": budget})]
    results = lab.run(command, env={"PYTHONPATH": str(_ROOT), **(variables or {})}, timeout=1200)
    bad = [result for result in results if result.returncode]
    if bad:
        raise RuntimeError(f"rank {bad[0].rank} ended with {bad[0].returncode}:\n{bad[0].stderr[-4000:]}")
    told: dict[str, Any] = json.loads(results[0].stdout.split("RESULT ", 1)[1])
    return told


def limit(nbytes: int, hosts: int, rate: float | None) -> float | None:
    """Seconds that an all-reduce takes on a link that is never idle: 2 (n - 1) / n of the bytes each way."""
    return None if rate is None else 2 * (hosts - 1) / hosts * nbytes * 8 / (rate * 1e6 * FRAME)


def labelled(told: dict[str, Any], hosts: int, rate: float | None, delay: float) -> list[dict[str, Any]]:
    """Adds to rows where they were measured, and what the tuning had chosen there."""
    chosen = {name: way for name, way in told["tuning"].items() if name != "measured"}
    place = {"hosts": hosts, "rate_mbit": rate, "delay_ms": delay, "tuning": chosen}
    return [
        {**place, **row, "limit": limit(row["bytes"], hosts, rate) if row["operation"] == "all_reduce" else None}
        for row in told["rows"]
    ]


def case(operation: str, nbytes: int, rounds: int, *names: str) -> dict[str, Any]:
    return {"operation": operation, "bytes": nbytes, "rounds": rounds, "rivals": ["gloo", "ours", *names]}


def large() -> list[dict[str, Any]]:
    """25 M float32 on four hosts: plain against the wire, compressed against plain Gloo."""
    rows = []
    for rate in (500.0, 1000.0):
        with netlab.Lab(4, rate) as lab:
            cases = [
                case("all_reduce", 100_000_000, 5, *_CODECS),
                case("reduce_scatter", 4 * _MEGA, 7),
                case("all_gather", 4 * _MEGA, 7),
                case("broadcast", 16 * _MEGA, 7),
            ]
            rows += labelled(run(lab, cases, 8.0), 4, rate, 0)
    return rows


def delayed() -> list[dict[str, Any]]:
    """Messages on long links, where the number of one-way delays decides."""
    rows = []
    for hosts in (2, 4):
        with netlab.Lab(hosts, 1000.0, 5.0) as lab:
            cases = [case("all_reduce", 4000, 21), case("all_reduce", _MEGA, 15)]
            cases += [case(name, nbytes, 11) for name in ("reduce_scatter", "all_gather") for nbytes in (4000, _MEGA)]
            rows += labelled(run(lab, cases, 8.0), hosts, 1000.0, 5.0)
    return rows


def grid() -> list[dict[str, Any]]:
    """Every operation at every size on short and long, slow and fast links: is anything slower than Gloo?"""
    rows, hosts = [], 4
    for rate, delay in ((1000.0, None), (None, None), (1000.0, 5.0)):
        with netlab.Lab(hosts, rate, delay) as lab:
            cases = []
            for operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
                for nbytes, rounds in ((4000, 41), (_MEGA, 31), (16 * _MEGA, 11 if rate else 31)):
                    whole = operation in ("all_reduce", "broadcast")
                    cases.append(case(operation, nbytes if whole else nbytes // hosts, rounds))
            rows += labelled(run(lab, cases, 8.0), hosts, rate, delay or 0)
    return rows


def lossy() -> list[dict[str, Any]]:
    """A long link that loses packets, which one TCP stream does not fill: four sockets per pair."""
    rows = []
    for loss in (0.0, 0.0005):
        with netlab.Lab(2, 1000.0, 20.0, loss=loss) as lab:
            cases = [case("all_reduce", nbytes, 9) for nbytes in (_MEGA, 16 * _MEGA)]
            told = run(lab, cases, 8.0, {"BAGUA_KERNELS_SOCKETS": "4"})
            rows += [{**row, "loss": loss} for row in labelled(told, 2, 1000.0, 20.0)]
    return rows


def wire_bytes() -> list[dict[str, Any]]:
    """Bytes that leave a host, headers and all, for an all-reduce of 4 M float32: each codec against Gloo's ring."""
    rows, nbytes, repeats = [], 16 * _MEGA, 3
    for hosts in (2, 3, 4, 8):
        sent: dict[str, float] = {}
        with netlab.Lab(hosts) as lab:
            for name in ("nothing", "gloo", *_CODECS):
                before = lab.bytes_sent(hosts - 1)
                some = {**case("all_reduce", nbytes, repeats - 1), "rivals": [name]}
                run(lab, [] if name == "nothing" else [some], 0.0)
                sent[name] = (lab.bytes_sent(hosts - 1) - before) / repeats
        idle = sent.pop("nothing")
        shares = {name: (sent[name] - idle) / (sent["gloo"] - idle) for name in _CODECS}
        rows.append({"hosts": hosts, "bytes": nbytes, "gloo": sent["gloo"] - idle, "shares": shares})
    return rows


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    if title == "bytes":
        table = Table(title="bytes that leave a host, share of Gloo's float32 ring")
        for column in ("hosts", *(f"{name} (bar {bar})" for name, bar in _CODECS.items())):
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(str(row["hosts"]), *(f"{row['shares'][name]:.4f}" for name in _CODECS))
        console.print(table)
        return
    table = Table(title=f"{title}: milliseconds, and how many times as fast as Gloo")
    for column in ("hosts", "Mbit/s", "ms", "operation", "bytes", "limit", "gloo", "ours", "", "95 %", "compressed"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = row["seconds"]
        gloo = seconds["gloo"]
        more = ", ".join(f"{name} {gloo / seconds[name]:.2f}x" for name in seconds if name not in ("gloo", "ours"))
        table.add_row(
            str(row["hosts"]),
            f"{row['rate_mbit'] or '-'}",
            f"{row['delay_ms']:g}",
            row["operation"],
            str(row["bytes"]),
            f"{row['limit'] * 1e3:.1f}" if row["limit"] else "",
            f"{gloo * 1e3:.2f}",
            f"{seconds['ours'] * 1e3:.2f}",
            f"{gloo / seconds['ours']:.2f}x",
            "{:.2f} to {:.2f}".format(*(1 / ratio for ratio in reversed(row["interval"]))),
            more,
        )
    console.print(table)
    ratios = [row["seconds"]["ours"] / row["seconds"]["gloo"] for row in rows]
    console.print(
        f"ours / gloo: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}, "
        f"{sum(ratio > 1.02 for ratio in ratios)} of {len(ratios)} above 1.02, "
        f"{sum(row['interval'][0] > 1.02 for row in rows)} of them surely"
    )


PARTS = {"large": large, "delayed": delayed, "lossy": lossy, "bytes": wire_bytes, "grid": grid}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.network", description="Collectives on emulated hosts.")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--output", type=Path, help="JSON file; parts that are not run keep what it holds")
    options = parser.parse_args()
    parts = {name: (measure, partial(show, title=name)) for name, measure in PARTS.items()}
    return run_parts(parts, options.only, options.output)
