"""Predicts the step time of every algorithm for a model and a network.

python -m bagua_kernels.algorithms.advise --model resnet50 --ranks 64 --bandwidth 10Gbps --latency 1ms [--json] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from bagua_kernels.algorithms.choosing.advise.models import MODELS
from bagua_kernels.algorithms.choosing.cost.facts import GPU, Job, Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import CLASSES, Method, methods
from bagua_kernels.algorithms.choosing.cost.predict import Prediction, predict
from bagua_kernels.algorithms.policy.optimizer_fit import holds_back
from bagua_kernels.compression import from_spec

_MOST_RANKS = 4096
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SHOWN = 8  # curves of a plot
_DOES = {
    "exact": "changes nothing",
    "synchronous": "rounds alike on all ranks",
    "any": "lets models differ between ranks",
}
_WIDEST = 10_000  # columns
_STDOUT = Path("-")
_KINDS = {"exact": "nothing", "synchronous": "rounding, alike on all ranks", "any": "models differ between ranks"}


def bits_per_second(text: str) -> float:
    """Reads a bandwidth, such as "10Gbps", "100 Mbit/s" or "1e9".

    Raises:
        ValueError: the text is no bandwidth above 0.
    """
    found = re.fullmatch(r"\s*([0-9.e+]+)\s*([kKmMgGtT]?)(bps|bit/s|bit)?\s*", text)
    if found is None or not float(found[1]) > 0:
        raise ValueError(f"expected a bandwidth such as 10Gbps or 100Mbit/s, got {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def seconds(text: str) -> float:
    """Reads a time, such as "1ms", "50us" or "0.2".

    Raises:
        ValueError: the text is no time of 0 or more.
    """
    found = re.fullmatch(r"\s*([0-9.e+-]+)\s*(s|ms|us)?\s*", text)
    if found is None or float(found[1]) < 0:
        raise ValueError(f"expected a time such as 1ms or 50us, got {text!r}")
    return float(found[1]) * {"ms": 1e-3, "us": 1e-6}.get(found[2] or "s", 1.0)


def ranked(job: Job, machine: Machine, network: Network, exactness: str) -> list[Prediction]:
    """Predictions of all methods that change no more than is allowed, the fastest first."""
    allowed = CLASSES[: CLASSES.index(exactness) + 1]
    found = [predict(method, job, machine, network) for method in methods() if method.exactness in allowed]
    return sorted(found, key=lambda one: one.seconds)


def loss(method: Method) -> str:
    """What is known of a method's loss after as many steps as with exact means, in a few words."""
    if method.exactness == "exact":
        return "the same"
    if method.exactness == "any":
        return "measure it"
    if method.low_rank or (method.codec and method.spec != "onebit_adam" and holds_back(from_spec(method.codec))):
        return "higher with Adam"
    return "almost the same"


def table(found: Sequence[Prediction], title: str) -> Table:
    """One row for each method."""
    grid = Table(title=title, title_justify="left")
    grid.add_column("method", no_wrap=True)
    # It is there to be copied, and no part of it may be left out.
    grid.add_column("as", no_wrap=True, overflow="ignore")
    for heading in ("changes", "loss"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("s a step", "DDP's", "MB sent", "s on the wire", "s of work"):
        grid.add_column(heading, justify="right", no_wrap=True)
    ddp = _seconds_of_ddp(found)
    for one in found:
        figures = f"{one.seconds:.4g}", f"x {one.seconds / ddp:.3f}", f"{one.sent / 1e6:.4g}"
        grid.add_row(
            one.method.name,
            one.method.spec or "PyTorch",
            _KINDS[one.method.exactness],
            loss(one.method),
            *figures,
            f"{one.wire:.4g}",
            f"{one.work:.4g}",
        )
    return grid


def notes(found: Sequence[Prediction]) -> list[str]:
    """What the order leaves out: the loss."""
    lines = [
        "The order is that of time alone: a faster step may need more of them. docs/trade-off.md shows how losses were measured."
    ]
    for exactness in CLASSES:
        best = next((one for one in found if one.method.exactness == exactness), None)
        if best is not None:
            lines.append(f"The fastest that {_DOES[exactness]}: {best.method.name}, {best.seconds:.4g} s a step.")
    return lines


def record(found: Sequence[Prediction], title: str) -> dict[str, Any]:
    """The table as a value for JSON, in seconds and bytes."""
    ddp = _seconds_of_ddp(found)
    rows = [
        {
            "method": one.method.name,
            "spec": one.method.spec,
            "changes": one.method.exactness,
            "loss": loss(one.method),
            "seconds": one.seconds,
            "of_ddp": one.seconds / ddp,
            "bytes_sent": one.sent,
            "seconds_on_the_wire": one.wire,
            "seconds_of_work": one.work,
        }
        for one in found
    ]
    return {"title": title, "notes": notes(found), "methods": rows}


def _seconds_of_ddp(found: Sequence[Prediction]) -> float:
    return next(one.seconds for one in found if one.method.name == "DDP")


def curves(
    job: Job, machine: Machine, network: Network, chosen: Sequence[Method]
) -> tuple[list[int], list[list[float]]]:
    """Seconds of a step by number of ranks, from one node of the network to 4,096 ranks."""
    ranks = [network.per_node << power for power in range(_MOST_RANKS.bit_length())]
    ranks = [count for count in ranks if count <= max(_MOST_RANKS, network.ranks)]
    networks = [replace(network, ranks=count) for count in ranks]
    return ranks, [[predict(one, job, machine, each).seconds for each in networks] for one in chosen]


def plot(path: Path, job: Job, machine: Machine, network: Network, found: Sequence[Prediction], title: str) -> None:
    """Draws the fastest methods' and DDP's step times by number of ranks.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from error
    chosen = [one.method for one in found[:_SHOWN]]
    chosen += [one.method for one in found if one.method.name == "DDP" and one.method not in chosen]
    ranks, times = curves(job, machine, network, chosen)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for method, values in zip(chosen, times, strict=True):
        axes.plot(ranks, values, label=method.name, color="black" if method.name == "DDP" else None)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds of a step, predicted")
    axes.set_title(title, fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser, options = _parse(arguments)
    try:
        return _advise(options)
    except BrokenPipeError:
        # Who reads the table has seen enough; the interpreter would write the rest once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))


def _advise(options: argparse.Namespace) -> int:
    if options.model is None:
        job = Job(options.step, (), options.elements, options.bucket_bytes)
        what = f"{options.elements:,} parameters, {options.step:g} s a step as given"
    else:
        model = MODELS[options.model]()
        step = model.seconds if options.step is None else options.step
        job = Job(step, model.matrices, bucket_bytes=options.bucket_bytes)
        source = model.source if options.step is None else "as given"
        what = f"{options.model}, {job.elements:,} parameters, {job.seconds:g} s a step ({source})"
    network = Network(options.ranks, options.bandwidth, options.latency, options.per_node, options.local_bandwidth)
    machine = Machine.load(options.profile) if options.profile else GPU
    where = f"{network.nodes} nodes of {network.per_node}, {network.bits_per_second / 1e9:g} Gbit/s, {1e3 * network.latency:g} ms"
    found = ranked(job, machine, network, options.exactness)
    title = f"{what}; {where}; {'machine of ' + str(options.profile) if options.profile else 'a GPU of 2017'}"
    # What can fail comes before what is printed.
    if options.plot:
        plot(options.plot, job, machine, network, found, title)
    if options.json:
        text = json.dumps(record(found, title), indent=1)
        if options.json != _STDOUT:
            options.json.write_text(text + "\n")
    if options.json == _STDOUT:
        print(text)
        return 0
    grid, screen = table(found, title), Console()
    needed = Measurement.get(screen, screen.options.update(width=_WIDEST), grid).maximum
    console = Console(width=max(screen.width, needed))
    console.print(grid)
    for line in notes(found):
        print(line)
    if options.plot:
        print(f"plot: {options.plot}")
    return 0


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m bagua_kernels.algorithms.advise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(MODELS))
    parser.add_argument(
        "--elements", type=int, help="parameters of another model; it needs --step, and has no low rank"
    )
    parser.add_argument("--step", type=seconds, help="seconds of a step without communication")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bandwidth", type=bits_per_second, required=True, help="of a node: 10Gbps, 100Mbit/s")
    parser.add_argument("--latency", type=seconds, default=5e-5, help="one way between nodes: 1ms (default: 50us)")
    parser.add_argument("--per-node", type=int, default=1, help="ranks of a node, which share its link")
    parser.add_argument("--local-bandwidth", type=bits_per_second, default=math.inf, help="of a rank inside its node")
    parser.add_argument("--bucket-bytes", type=int, default=10 << 20)
    parser.add_argument("--exactness", choices=CLASSES, default="any", help="the most that may change (default: any)")
    parser.add_argument("--profile", type=Path, help="a machine's facts; by default those of a GPU of 2017")
    parser.add_argument("--plot", type=Path, help="picture of step times by number of ranks, up to 4,096")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write JSON there; without FILE instead of the table",
    )
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out")
    if (options.model is None) == (options.elements is None):
        parser.error("give either --model or --elements")
    if options.elements is not None and options.step is None:
        parser.error("--elements needs --step")
    return parser, options
