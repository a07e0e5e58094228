"""Predicts the step time of every algorithm for a model and a network.

python -m bagua_kernels.algorithms.advise --model resnet50 --ranks 64 --bandwidth 10Gbps --latency 1ms [--plot FILE]
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms.advise.models import MODELS
from bagua_kernels.algorithms.tuner.cost.facts import GPU, Job, Machine, Network
from bagua_kernels.algorithms.tuner.cost.methods import CLASSES, Method, methods
from bagua_kernels.algorithms.tuner.cost.predict import Prediction, predict

_MOST_RANKS = 4096
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SHOWN = 8  # curves of a plot


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


def table(found: Sequence[Prediction], title: str) -> Table:
    """One row for each method."""
    grid = Table(title=title, title_justify="left")
    for heading in ("method", "as", "changes"):
        grid.add_column(heading)
    for heading in ("s a step", "DDP's", "MB sent", "s on the wire", "s of work"):
        grid.add_column(heading, justify="right")
    ddp = next((one.seconds for one in found if one.method.name == "DDP"), math.nan)
    kinds = {"exact": "nothing", "synchronous": "rounding, alike on all ranks", "any": "models differ between ranks"}
    for one in found:
        figures = f"{one.seconds:.4g}", f"x {one.seconds / ddp:.3f}", f"{one.sent / 1e6:.4g}"
        grid.add_row(
            one.method.name,
            one.method.spec or "PyTorch",
            kinds[one.method.exactness],
            *figures,
            f"{one.wire:.4g}",
            f"{one.work:.4g}",
        )
    return grid


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
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from error
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
    except (ValueError, OSError) as error:
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
    Console(width=max(Console().width, 150)).print(table(found, title))
    if options.plot:
        plot(options.plot, job, machine, network, found, title)
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
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.elements is None):
        parser.error("give either --model or --elements")
    if options.elements is not None and options.step is None:
        parser.error("--elements needs --step")
    return parser, options
