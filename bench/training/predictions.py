"""Compares predicted steps with measured ones: `python -m bench.training.predictions [--profile …/machine.json] [--output FILE]`.

The facts of the machine that measured `bench/results/training.json` are fitted to its rows without a limit, and to DDP's and
`GradientAllReduce`'s rows at 500 Mbit/s. All other rows of the file are predicted from them, those at other rates and with delays
among them, which nothing was fitted to. So this repeats: it measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagua_kernels.algorithms.choosing.cost.facts import Job, Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import Method, known
from bagua_kernels.algorithms.choosing.cost.predict import predict
from bench import speed
from bench.training.models import MODELS

RESULTS = Path(__file__).resolve().parents[1] / "results"
FITTED = 500.0  # Mbit/s
_DDP_BUCKET = 25 << 20  # bytes
# What rows call the methods.
NAMES = {
    "ddp": "DDP",
    "ddp fp16": "DDP fp16",
    "allreduce": "GradientAllReduce",
    "bytegrad": "ByteGrad",
    "int8": "8 bits",
    "int4": "4 bits",
    "sign": "SignSGD",
    "topk": "TopK 1 %",
    **{f"powersgd {rank}": f"PowerSGD {rank}" for rank in (1, 2, 4)},
    "decentralized": "Decentralized",
    "sgp": "SGP",
    "lowprec 8": "LowPrecisionDecentralized 8",
    "lowprec 2": "LowPrecisionDecentralized 2",
    "choco": "Choco",
    "d2": "D2 ring",
    "d2 chain": "D2 chain",
    "local_sgd": "LocalSGD 16",
    "diloco int4": "DiLoCo 30, 4 bits",
    "sparse_loco": "SparseLoCo 30",
    "sparse_loco delayed": "SparseLoCo 30",
    "async float32": "AsyncModelAverage",
}


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each method, model and network that was measured: method, model, network and seconds."""
    by_name, found = known(), []
    for part in ("steps", "delays", "local", "asynchronous"):
        for row in report[part]:
            rate, delay = row["rate_mbit"], row.get("delay_ms") or 0.0
            network = Network(row.get("hosts", 4), float("inf") if rate is None else rate * 1e6, delay / 1e3)
            for name, seconds in row["seconds"].items():
                if name in NAMES:
                    # Of a run of its own, whose machine may have had another speed.
                    alone = row["seconds"].get("alone") if part in ("local", "asynchronous") else None
                    base = {"name": name, "model": row["model"], "rate": rate, "delay": delay, "alone": alone}
                    found.append({**base, "method": by_name[NAMES[name]], "network": network, "seconds": seconds})
    return found


def job(model: str, seconds: float) -> Job:
    """A model of the benchmark."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in MODELS[model]().parameters()]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    matrices = [(shape[0], size // shape[0]) for shape, size in zip(shapes, sizes, strict=True) if len(shape) > 1]
    return Job(seconds, tuple(matrices), sum(sizes))


def bucketed(one: Job, name: str) -> Job:
    """A job with the buckets of a row's rival: DDP's are larger."""
    return dataclasses.replace(one, bucket_bytes=_DDP_BUCKET) if name.startswith("ddp") else one


def alone(report: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step of each model without communication, while other ranks have the rest of the machine."""
    found: dict[str, list[float]] = {}
    for row in report["steps"]:
        if "alone" in row["seconds"]:
            found.setdefault(row["model"], []).append(row["seconds"]["alone"])
    seconds = {model: statistics.median(times) for model, times in found.items()}
    # Made for steps of 50 ms on half a processor, by its own account.
    return {"small": 0.05, **seconds}


def fit(report: dict[str, Any]) -> Machine:
    """The machine's facts: medians over rows, each solved for the one fact that it depends on."""
    base = alone(report)
    free = [row for row in rows(report) if row["rate"] is None and not row["delay"] and row["alone"] is None]

    def extra(row: dict[str, Any], per_byte: float) -> float:
        one = job(row["model"], base[row["model"]])
        return max(0.0, row["seconds"] - one.seconds - per_byte * row["method"].sent(one, row["network"].nodes))

    def ratio(row: dict[str, Any], per_byte: float) -> float:
        one = job(row["model"], base[row["model"]])
        return extra(row, per_byte) / (one.elements if row["method"].codec else sum(m * n for m, n in one.matrices))

    plain = [row for row in free if row["name"] in ("ddp", "allreduce")]
    per_byte = statistics.median(
        extra(row, 0.0) / row["method"].sent(job(row["model"], base[row["model"]]), row["network"].nodes)
        for row in plain
    )
    work: dict[str, list[float]] = {}
    for row in free:
        if row["method"].codec:
            work.setdefault(row["method"].codec.split(":")[0], []).append(ratio(row, per_byte))
    factor = statistics.median(ratio(row, per_byte) for row in free if row["method"].low_rank)
    exposed = statistics.median(
        (row["seconds"] - row["network"].seconds(row["method"].sent(one, row["network"].nodes), 0)) / one.seconds
        for row in rows(report)
        if row["rate"] == FITTED and not row["delay"] and row["name"] in ("ddp", "allreduce")
        for one in [job(row["model"], base[row["model"]])]
    )
    costs = {name: statistics.median(values) for name, values in work.items()}
    # What was not measured is about as dear as 8 bits.
    return Machine(exposed, per_byte, {"": costs["minmax_uint8"], **costs}, factor)


def errors(report: dict[str, Any], machine: Machine) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each row, and whether its network was used in the fit."""
    base, found = alone(report), []
    for row in rows(report):
        method: Method = row["method"]
        one = bucketed(job(row["model"], row["alone"] or base[row["model"]]), row["name"])
        seconds = predict(method, one, machine, row["network"]).seconds
        place = {name: row[name] for name in ("name", "model", "rate", "delay", "seconds")}
        fitted = not row["delay"] and row["rate"] in (None, FITTED) and row["alone"] is None
        found.append({**place, "predicted": seconds, "error": seconds / row["seconds"] - 1, "fitted": fitted})
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Median and largest errors, of all rows and of those on networks that nothing was fitted to."""
    unseen = [abs(row["error"]) for row in found if not row["fitted"]]
    ratios = [max(row["predicted"] / row["seconds"], row["seconds"] / row["predicted"]) for row in found]
    return {
        "rows": len(found),
        "median_error": statistics.median(abs(row["error"]) for row in found),
        "rows_unseen": len(unseen),
        "median_error_unseen": statistics.median(unseen),
        "largest_ratio": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=Path, default=RESULTS / "training.json", help="what was measured")
    parser.add_argument("--profile", type=Path, help="file for the machine's facts, as the adviser reads it")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    report = json.loads(options.training.read_text())
    machine = fit(report)
    found = errors(report, machine)
    grid = Table(title=str(machine), title_justify="left")
    for heading in ("row", "model", "Mbit/s", "ms", "measured s", "predicted s", "error"):
        grid.add_column(heading, justify="left" if heading in ("row", "model") else "right")
    for row in sorted(found, key=lambda one: (one["model"], one["rate"] or 1e9, one["delay"], one["name"])):
        rate = "no limit" if row["rate"] is None else f"{row['rate']:g}"
        times = f"{row['seconds']:.3f}", f"{row['predicted']:.3f}", f"{row['error']:+.0%}"
        grid.add_row(row["name"], row["model"], rate, f"{row['delay']:g}", *times)
    console = speed.console()
    console.print(grid)
    console.print({name: round(value, 3) for name, value in summary(found).items()})
    if options.profile:
        machine.save(options.profile)
    if options.output:
        speed.write(options.output, {"summary": summary(found), "rows": found})


if __name__ == "__main__":
    main()
