"""Training steps on emulated hosts: against DistributedDataParallel and its communication hooks, for each rate of the links.

python -m bench.training [--rates 100,500,1000,5000,none] [--models fc,tr] [--steps 12] [--methods decentralized]
                         [--only steps,engine,overlap,delays,local,asynchronous,activation,choice,drift] [--trace FILE]
                         [--output bench/results/training.json]

Needs Linux and root, as `bench.network` does. A step is forward, backward and the optimizer's step, with one thread a rank.
It lasts until the last rank is through with it; medians over steps are reported. Rivals take turns in random order, in blocks
of a few steps that follow one another as in training, after one that is not counted.
Each host keeps to its share of the processors. With four of them on few cores, arithmetic takes longer than on machines of
their own, and so does that of codecs.

`engine` is what hooks and buckets cost without any communication, `overlap` how much of it backward hides. `delays` is about
links that are fast but long, and a small model: there it counts how many messages wait for one another. `local` is about
algorithms with local steps on lines of 1 to 100 Mbit/s. `asynchronous` is about averages beside training,
and `activation` about how soon late ranks take part in these. `choice` is what a tuner chooses, `drift` what it does when links
become slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

from bench.netlab import lab as netlab
from bench.network.measure import limit
from bench.network.parts import run_parts
from bench.network.rank import interval
from bench.training import activation, asynchronous, choice, groups, local_steps, report

_ROOT = Path(__file__).resolve().parents[2]
_HOSTS = 4
_TUNING = 8.0  # seconds, about: what `comm.tune` takes by itself
_DELAYED_STEPS, _DELAYED_BLOCK = 48, 8  # for each rival, and of them in a block
_GRADIENT_BYTES = {"fc": 77_468_176, "tr": 43_472_896, "small": 4_245_904}
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


def run(
    hosts: int,
    part: str,
    settings: dict[str, Any],
    root: Path = _ROOT,
    delay: float | None = None,
    module: str = "bench.training.rank",
) -> dict[str, Any]:
    """Runs a part of a module of the checkout in `root` on one rank per host, `delay` ms apart.

    Rank 0 sets the links' rates.
    """
    # Other work on the machine, which a row's times contain.
    load = os.getloadavg()[0]
    with netlab.Lab(hosts, delay=delay) as lab, links(lab) as address:
        told = json.dumps({"part": part, "links": address, "budget": _TUNING, **settings})
        # Commits from before the rooms have it elsewhere.
        module = module if (root / "bench/training/rank.py").exists() else "bench.training_rank"
        command = [sys.executable, "-m", module, told]
        results = lab.run(command, env={"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}, timeout=3600)
    bad = [result for result in results if result.returncode]
    if bad:
        # The first rank with an error is seldom rank 0; each error may help.
        text = "\n".join(f"rank {one.rank} ended with {one.returncode}:\n{one.stderr[-2500:]}" for one in bad)
        raise RuntimeError(text)
    answer: dict[str, Any] = json.loads(results[0].stdout.split("RESULT ", 1)[1])
    return {**answer, "load_average": load}


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
        planned = [
            (group, [one for one in rates if not only_unlimited or one[0] is None])
            for group, only_unlimited in groups.wanted(options.methods)
        ]
        settings = {"model": model, "groups": [group for group in planned if group[1]], "tunings": tunings}
        told = run(_HOSTS, "steps", settings)
        # Links are the same for the next model, and to measure them takes a minute where they are slow.
        tunings = told["tunings"]
        rows += described(told, model, None)
    return rows


def described(told: dict[str, Any], model: str, delay: float | None) -> list[dict[str, Any]]:
    """A row for each group and rate, of what the ranks have measured."""
    rows = []
    for row in told["rows"]:
        times, rate = row["times"], row["rate_mbit"]
        chosen = {name: way for name, way in json.loads(told["tunings"][str(rate)]).items() if name != "measured"}
        rows.append(
            {
                "model": model,
                "hosts": _HOSTS,
                "rate_mbit": rate,
                **({} if delay is None else {"delay_ms": delay}),
                "tuning": chosen,
                "counted": len(times["ddp"]),
                "load_average": told["load_average"],
                "limit": limit(_GRADIENT_BYTES[model], _HOSTS, rate),
                "seconds": {name: statistics.median(each) for name, each in times.items()},
                "costs": row["costs"],
                "trials": row["trials"],
                "bars": [compared(times, *bar) for bar in groups.bars(rate, list(times), delay)],
            }
        )
    return rows


def delays(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A small model on long links: neighbours wait for one delay, rings of an all-reduce for several."""
    rounds = -(-(options.steps or _DELAYED_STEPS) // _DELAYED_BLOCK)
    settings = {
        "model": "small",
        "groups": [(groups.DELAYED, [(groups.DELAYED_RATE, rounds, _DELAYED_BLOCK)])],
        "tunings": {},
    }
    return described(run(_HOSTS, "steps", settings, delay=groups.DELAY), "small", groups.DELAY)


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


def local(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Local steps on slow lines; the transport keeps its defaults, for to measure lines of 1 Mbit/s takes minutes."""
    told = run(
        _HOSTS, "local", {"model": "tr", "blocks": local_steps.BLOCKS, "steps": options.steps or local_steps.STEPS}
    )
    return local_steps.described(told, "tr")


def beside(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Averages beside training on one slow line."""
    settings = {"model": "tr", "blocks": asynchronous.BLOCKS, "steps": options.steps or asynchronous.STEPS}
    return asynchronous.described(run(_HOSTS, "asynchronous", settings), "tr")


def started(options: argparse.Namespace) -> list[dict[str, Any]]:
    """How soon late ranks take part in averages that others have started."""
    settings = {"model": "tr", "steps": options.steps or activation.STEPS}
    return activation.described(run(_HOSTS, "activation", settings), "tr")


def chosen(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a tuner chooses, on links with and without a delay."""
    rows = []
    for model in options.models:
        for delay, rates in ((None, list(choice.RATES)), (choice.DELAY, [choice.DELAYED_RATE])):
            # In processes of their own: what a rate leaves in memory would not leave room for the next.
            for rate in [rate for rate in rates if rate in options.rates]:
                told = run(_HOSTS, "choice", {"model": model, "rate": rate, "blind": delay is None}, delay=delay)
                rows += choice.described(told, model, delay)
    return rows


def drift(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a tuner does when links become slower."""
    found = [(model, run(_HOSTS, "drift", {"model": model})) for model in options.models]
    return [row for model, told in found for row in choice.drifted(told, model)]


PARTS = {
    "steps": (steps, report.show_steps),
    "engine": (engine, report.show_engine),
    "overlap": (overlap, report.show_overlap),
    "delays": (delays, report.show_delays),
    "local": (local, local_steps.show),
    "asynchronous": (beside, asynchronous.show),
    "activation": (started, activation.show),
    "choice": (chosen, choice.show),
    "drift": (drift, choice.show_drift),
}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows, and old ones of models, rates and groups that were not measured anew."""
    measured = [(place(row), groups.own(row["seconds"])) for row in new]
    kept = [
        row
        for row in old
        if "model" in row and not any(place(row) == at and groups.own(row["seconds"]) & names for at, names in measured)
    ]
    return kept + new


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row was measured on."""
    return row.get("model"), row.get("rate_mbit"), row.get("delay_ms")


def rates_of(text: str) -> list[float | None]:
    return [None if word == "none" else float(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="Training steps on emulated hosts.")
    parser.add_argument("--rates", type=rates_of, default="100,500,1000,5000,none", help="Mbit/s, or none")
    parser.add_argument("--models", type=lambda text: text.split(","), default="fc,tr", help="of fc and tr")
    parser.add_argument("--steps", type=int, help="counted steps of each rival (default: fewer on slow links)")
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        help="gradients, decentralized, or names of rivals, whose groups are measured; all by default",
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--trace", help="Chrome trace of an overlapped step, for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--output", type=Path, help="JSON file; what is not measured anew keeps what it holds")
    options = parser.parse_args()
    options.trace = options.trace and str(Path(options.trace).resolve())
    parts = {name: (partial(measure, options), show) for name, (measure, show) in PARTS.items()}
    return run_parts(parts, options.only, options.output, merged)
