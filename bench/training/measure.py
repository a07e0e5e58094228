"""Training steps on emulated hosts: against DistributedDataParallel and its communication hooks, for each rate of the links.

python -m bench.training [--rates 100,500,1000,5000,none] [--models fc,tr] [--steps 12] [--only steps,engine,overlap]
                         [--trace FILE] [--output bench/results/training.json]

Needs Linux and root, as `bench.network` does. A step is forward, backward and the optimizer's step, with one thread a rank.
It lasts until the last rank is through with it; medians over steps are told. Rivals take turns in random order, in blocks of a
few steps that follow one another as in training, after one that is not counted.
Each host keeps to its share of the processors. With four of them on few cores, arithmetic takes longer than on machines of
their own, and so does that of codecs.

`engine` is what hooks and buckets cost without any communication, `overlap` how much of it backward hides.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.netlab import lab as netlab
from bench.network.measure import limit
from bench.network.parts import run_parts
from bench.network.rank import interval

_ROOT = Path(__file__).resolve().parents[2]
_HOSTS = 4
_TUNING = 8.0  # seconds, about: what `comm.tune` takes by itself
_MANY = 6  # steps from which on an interval is worth a verdict
_RANKS = (1, 2, 4)
_GRADIENT_BYTES = {"fc": 77_468_176, "tr": 43_472_896}
# DDP is in all, as what ratios refer to: rivals of different groups are not measured at the same time. The more there are
# side by side, the less of each is left in caches and the longer it lasts until a turn comes again.
_WAYS = ("", " in backward")
_SIDES = ("", " in turn")  # of PowerSGD: both factors in a step, or one
_METHODS = [
    ["alone", "ddp", "ddp fp16", "allreduce", "allreduce in backward", *(f"bytegrad{way}" for way in _WAYS)],
    ["ddp", "int8", "sign", "topk"],
    ["ddp", "ddp powersgd 1", "powersgd 1"],
    *(
        ["ddp", f"ddp powersgd {rank}", *(f"powersgd {rank}{sides}{way}" for way in _WAYS)]
        for rank in (2, 4)
        for sides in _SIDES
    ),
]
_OURS = ["bytegrad", "int8", "sign", "topk", *(f"powersgd {rank}" for rank in _RANKS)]
_TRIED = [[f"{name} if faster" for name in names] for names in (_OURS[:4], _OURS[4:])]
# Up to which rate, how many steps for each rival, and how many of them in a block: on slow links a step takes 10 s.
_STEPS: list[tuple[float, int, int]] = [(200.0, 3, 3), (1000.0, 12, 6), (float("inf"), 24, 8)]


def _serve(listener: Listener, lab: netlab.Lab) -> None:
    """Sets links to the rates that a rank asks for."""
    with listener.accept() as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            rate = connection.recv()
            try:
                for host in range(lab.hosts):
                    lab.shape(host, rate)
                connection.send("")
            except (netlab.LabError, OSError) as error:
                connection.send(f"{error}")


@contextlib.contextmanager
def links(lab: netlab.Lab) -> Iterator[str]:
    """The path of a socket on which a rank can ask for another rate; paths are not divided by network namespaces."""
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/links", "AF_UNIX") as listener:
        threading.Thread(target=_serve, args=(listener, lab), daemon=True).start()
        yield f"{folder}/links"


def run(hosts: int, part: str, settings: dict[str, Any], root: Path = _ROOT) -> dict[str, Any]:
    """Runs a part of the checkout in `root` on one rank per host; rank 0 sets the links."""
    with netlab.Lab(hosts) as lab, links(lab) as address:
        told = json.dumps({"part": part, "links": address, "budget": _TUNING, **settings})
        # Commits from before the rooms have it elsewhere.
        module = "bench.training.rank" if (root / "bench/training/rank.py").exists() else "bench.training_rank"
        command = [sys.executable, "-m", module, told]
        results = lab.run(command, env={"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}, timeout=3600)
    bad = [result for result in results if result.returncode]
    if bad:
        # The first rank with an error is seldom rank 0; each error may help.
        text = "\n".join(f"rank {one.rank} ended with {one.returncode}:\n{one.stderr[-2500:]}" for one in bad)
        raise RuntimeError(text)
    answer: dict[str, Any] = json.loads(results[0].stdout.split("RESULT ", 1)[1])
    return answer


def bars(rate: float | None, rivals: list[str]) -> list[tuple[str, str, float]]:
    """What is to be at most how many times what, where both were measured."""
    found = [("allreduce", "ddp", 1.0), ("allreduce in backward", "ddp", 1.0)]
    if rate == 500.0:
        for way in _WAYS:
            found += [(f"bytegrad{way}", "ddp", 0.35), (f"bytegrad{way}", "ddp fp16", 0.65)]
    for rank in (2, 4):
        found += [(f"powersgd {rank}{sides}{way}", f"ddp powersgd {rank}", 0.6) for sides in _SIDES for way in _WAYS]
    if rate is None:
        found += [(name, "ddp", 1.02) for name in (*_OURS, *itertools.chain(*_TRIED))]
    return [bar for bar in found if set(bar[:2]) <= set(rivals)]


def compared(times: dict[str, list[float]], ours: str, rival: str, bar: float) -> dict[str, Any]:
    ratio = statistics.median(times[ours]) / statistics.median(times[rival])
    spread = interval(np.array(times[ours]), np.array(times[rival]))
    counted = min(len(times[ours]), len(times[rival]))
    return {"ours": ours, "rival": rival, "bar": bar, "ratio": ratio, "interval": spread, "counted": counted}


def plan(rate: float | None, wanted: int | None) -> tuple[float | None, int, int]:
    """Rounds and steps of a block at a rate."""
    steps, block = next((n, block) for most, n, block in _STEPS if (rate or float("inf")) <= most)
    return rate, -(-(wanted or steps) // block), block


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each model at each rate."""
    rows: list[dict[str, Any]] = []
    tunings: dict[str, str] = {}
    rates = [plan(rate, options.steps) for rate in options.rates]
    for model in options.models:
        # `only_if_faster` is measured without a limit, where compression hardly pays.
        unlimited = [rate for rate in rates if rate[0] is None]
        groups = [*((group, rates) for group in _METHODS), *((["ddp", *names], unlimited) for names in _TRIED)]
        settings = {"model": model, "groups": [group for group in groups if group[1]], "tunings": tunings}
        told = run(_HOSTS, "steps", settings)
        # Links are the same for the next model, and to measure them takes a minute where they are slow.
        tunings = told["tunings"]
        for row in told["rows"]:
            times, rate = row["times"], row["rate_mbit"]
            chosen = {name: way for name, way in json.loads(tunings[str(rate)]).items() if name != "measured"}
            rows.append(
                {
                    "model": model,
                    "hosts": _HOSTS,
                    "rate_mbit": rate,
                    "tuning": chosen,
                    "counted": len(times["ddp"]),
                    "limit": limit(_GRADIENT_BYTES[model], _HOSTS, rate),
                    "seconds": {name: statistics.median(each) for name, each in times.items()},
                    "costs": row["costs"],
                    "trials": row["trials"],
                    "bars": [compared(times, *bar) for bar in bars(rate, list(times))],
                }
            )
    return rows


def engine(options: argparse.Namespace) -> list[dict[str, Any]]:
    """ResNet-18 with all that the engine does but exchanges; gradients that are kept need not be copied into buckets."""
    told = run(2, "engine", {"rounds": options.steps or 10, "counted": 2})
    times = told["times"]
    pairs = [("engine", "alone"), ("ddp", "alone"), ("engine, gradients kept", "alone, gradients kept")]
    return [
        {
            "seconds": {name: statistics.median(each) for name, each in times.items()},
            "cpu_seconds": {name: statistics.median(each) for name, each in told["cpu"].items()},
            "bars": [compared(times, ours, rival, 1.01) for ours, rival in pairs],
        }
    ]


def overlap(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Two ranks, so that each has a core, on links on which communication takes as long as backward, or longer."""
    settings = {"model": "resnet18", "rounds": max(2, (options.steps or 12) // 3), "counted": 3, "trace": options.trace}
    rows: list[dict[str, Any]] = run(2, "overlap", settings)["rows"]
    return rows


def show_steps(console: Console, rows: list[dict[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        rates = list(dict.fromkeys(row["rate_mbit"] for row in of))
        table = Table(title=f"{model}, {_HOSTS} hosts: seconds a step (times DDP's; MB that leave a host; CPU seconds)")
        table.add_column("")
        for rate in rates:
            table.add_column("no limit" if rate is None else f"{rate:g} Mbit/s", justify="right")
        at = {(row["rate_mbit"], name): row for row in reversed(of) for name in row["seconds"]}
        wires = [row["limit"] for rate in rates for row in of if row["rate_mbit"] == rate and "alone" in row["seconds"]]
        table.add_row("DDP's bytes alone", *("" if wire is None else f"{wire:.2f}" for wire in wires))
        for name in dict.fromkeys(name for row in of for name in row["seconds"]):
            cells = []
            for rate in rates:
                if (rate, name) not in at:
                    cells.append("")
                    continue
                row = at[rate, name]
                seconds, cost = row["seconds"], row["costs"][name]
                ratio = seconds[name] / seconds["ddp"]
                cells.append(f"{seconds[name]:.3f} ({ratio:.2f}; {cost['bytes'] / 1e6:.2f}; {cost['cpu']:.2f})")
            table.add_row(name, *cells)
        console.print(table)
    show_bars(console, rows)


def show_bars(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="bars")
    for column in ("model", "Mbit/s", "ours", "rival", "ratio", "95 %", "at most", ""):
        table.add_column(column, justify="right")
    for row in rows:
        for bar in row["bars"]:
            low, high = bar["interval"]
            # An interval from a few steps means little.
            surely = "" if bar["counted"] < _MANY or low <= bar["bar"] <= high else "surely "
            verdict = "met" if bar["ratio"] <= bar["bar"] else "missed"
            place = (row.get("model", "resnet18"), f"{row.get('rate_mbit') or '-'}")
            numbers = (f"{bar['ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{bar['bar']:g}", surely + verdict)
            table.add_row(*place, bar["ours"], bar["rival"], *numbers)
    console.print(table)


def show_engine(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for what in ("seconds", "cpu_seconds"):
            console.print(f"ResNet-18, ms a step, {what}:", {n: round(1e3 * each, 2) for n, each in row[what].items()})
    show_bars(console, rows)


def show_overlap(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="ResNet-18, 2 hosts: share of communication that is hidden, or not waited for; ms a step")
    for column in ("", "Mbit/s", "alone", "ddp", "with it", "exchange", "hidden", "not waited for"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [f"{1e3 * row['seconds'][name]:.0f}" for name in ("alone", "ddp", row["name"])]
        shares = [f"{row[share]:.2f}" for share in ("hidden", "beside_backward")]
        table.add_row(row["name"], f"{row['rate_mbit']:g}", *times, f"{1e3 * row['exchange']:.0f}", *shares)
    console.print(table)


PARTS = {"steps": (steps, show_steps), "engine": (engine, show_engine), "overlap": (overlap, show_overlap)}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows, and old ones of models and rates that were not measured anew."""
    measured = {(row.get("model"), row.get("rate_mbit")) for row in new}
    return [row for row in old if "model" in row and (row["model"], row["rate_mbit"]) not in measured] + new


def rates_of(text: str) -> list[float | None]:
    return [None if word == "none" else float(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="Training steps on emulated hosts.")
    parser.add_argument("--rates", type=rates_of, default="100,500,1000,5000,none", help="Mbit/s, or none")
    parser.add_argument("--models", type=lambda text: text.split(","), default="fc,tr", help="of fc and tr")
    parser.add_argument("--steps", type=int, help="counted steps of each rival (default: fewer on slow links)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--trace", help="Chrome trace of an overlapped step, for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--output", type=Path, help="JSON file; what is not measured anew keeps what it holds")
    options = parser.parse_args()
    options.trace = options.trace and str(Path(options.trace).resolve())
    parts = {name: (partial(measure, options), show) for name, (measure, show) in PARTS.items()}
    return run_parts(parts, options.only, options.output, merged)
