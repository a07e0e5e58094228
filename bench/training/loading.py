"""Measures the samplers of unequal samples: `python -m bench.training.loading [--output …/loading.json]`.

Lengths are those of recorded speech (Debian's `asterisk-core-sounds-*-wav`) where it is installed. Otherwise they are those of
the entries of a dictionary (`dict-gcide`), or drawn from the quantiles of speech.

    balance     the largest cost of a step over the mean of its ranks, counted, averaged over an epoch; `DistributedSampler` too
    throughput  two processes with a processor each, which work in proportion to the length and meet after each step.
                The speed-up over `DistributedSampler`, beside the one that the counted costs promise
    order       time to make an epoch of many samples, over that of one `numpy.argsort` of as many float32
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.utils.data import DistributedSampler

from bagua_kernels import comm
from bagua_kernels.algorithms import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from bagua_kernels.comm.testing import run_processes
from bench import speed

SPEECH = Path("/usr/share/asterisk/sounds")
DICTIONARY = Path("/usr/share/dictd/gcide.index")
# Of the speech's lengths in seconds, for machines without either.
PARTS, QUANTILES = (0.0, 0.05, 0.5, 0.95, 0.99, 1.0), (0.2, 0.5, 1.35, 8.0, 25.0, 85.6)
RANKS = 4
SECONDS = 6.0  # of work in an epoch of the slower order
ROUNDS = 3
SAMPLES = 10_000_000


def speech() -> np.ndarray:
    """Seconds of each recording; one that is empty is left out."""
    found = []
    for file in sorted(SPEECH.rglob("*.wav")):
        with wave.open(str(file)) as one:
            found.append(one.getnframes() / one.getframerate())
    return np.array([length for length in found if length > 0])


def entries() -> np.ndarray:
    """Bytes of each entry: the third column of dictd's index, in its digits of base 64."""
    digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    found = []
    for line in DICTIONARY.read_bytes().splitlines():
        size = 0
        for digit in line.split(b"\t")[2]:
            size = size * 64 + digits.index(digit)
        found.append(size)
    return np.array([float(size) for size in found if size])


def lengths() -> tuple[str, np.ndarray]:
    """Real lengths of this machine, or drawn ones, and what they are."""
    if SPEECH.exists():
        return "speech", speech()
    if DICTIONARY.exists():
        return "dictionary", entries()
    parts = np.random.default_rng(0).random(2830)
    return "drawn", np.exp(np.interp(parts, PARTS, np.log(QUANTILES)))


def ours(costs: np.ndarray, ranks: int, epoch: int = 0) -> list[list[int]]:
    """Samples of each rank, one per step."""
    made = [LoadBalancingDistributedSampler(range(len(costs)), costs, ranks, rank) for rank in range(ranks)]
    for one in made:
        one.set_epoch(epoch)
    return [list(one) for one in made]


def plain(costs: np.ndarray, ranks: int, epoch: int = 0) -> list[list[int]]:
    """The same of PyTorch's sampler."""
    made = [DistributedSampler(range(len(costs)), ranks, rank) for rank in range(ranks)]  # type: ignore[arg-type]
    for one in made:
        one.set_epoch(epoch)
    return [list(one) for one in made]


def imbalance(costs: np.ndarray, drawn: Iterable[list[int]]) -> float:
    """The largest cost of a step over the mean of its ranks, averaged over steps."""
    found = costs[np.array(list(drawn))]
    return float((found.max(0) / found.mean(0)).mean())


def work(times: list[list[float]]) -> None:
    """Works through a rank's steps, each of which ends on all ranks together, and prints the seconds."""
    torch.set_num_threads(1)
    comm.init(timeout=60)
    communicator = comm.world()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[communicator.rank]})
    matrix, one = torch.randn(64, 64), torch.zeros(1)
    communicator.barrier().wait()
    began = time.perf_counter()
    for seconds in times[communicator.rank]:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            matrix @ matrix
        communicator.all_reduce(one).wait()
    print(time.perf_counter() - began, flush=True)
    comm.shutdown()


def epoch_seconds(times: list[list[float]]) -> float:
    """Seconds of the slower of two processes."""
    results = run_processes(work, 2, args=(times,), timeout=60 + 10 * SECONDS)
    failed = [result.stderr for result in results if result.returncode]
    if failed:
        raise RuntimeError(failed[0])
    return max(float(result.stdout.split()[-1]) for result in results)


def throughput(costs: np.ndarray) -> dict[str, Any]:
    """Two ranks' speed-up over `DistributedSampler`, in turns, and what the costs promise."""
    some = np.random.default_rng(0).choice(costs, 400, replace=False)
    orders = {"plain": plain(some, 2), "ours": ours(some, 2)}
    unit = SECONDS / some[np.array(orders["plain"])].max(0).sum()
    times = {name: [(unit * some[one]).tolist() for one in order] for name, order in orders.items()}
    promised = {name: float(np.max(found, axis=0).sum()) for name, found in times.items()}
    taken: dict[str, list[float]] = {name: [] for name in orders}
    for turn in range(ROUNDS):
        for name in sorted(orders, reverse=bool(turn % 2)):
            taken[name].append(epoch_seconds(times[name]))
    gained = statistics.median(taken["plain"]) / statistics.median(taken["ours"])
    counted = promised["plain"] / promised["ours"]
    return {"speed_up": gained, "promised": counted, "part": gained / counted, "seconds": taken}


def batches(costs: np.ndarray, size: int = 8) -> dict[str, float]:
    """Counted seconds of two ranks' epoch of padded batches, random and grouped by length, over those of ours."""
    generator = np.random.default_rng(0)

    def seconds(ranks: list[list[Any]]) -> float:
        return sum(max(costs[batch].max() * len(batch) for batch in step) for step in zip(*ranks, strict=False))

    def dealt(order: np.ndarray) -> float:
        parts = [order[begin : begin + size] for begin in range(0, len(order) // (2 * size) * 2 * size, size)]
        return seconds([parts[::2], parts[1::2]])

    order = generator.permutation(len(costs))
    groups = [order[begin : begin + 50 * size] for begin in range(0, len(order), 50 * size)]
    ranked = np.concatenate([group[np.argsort(-costs[group], kind="stable")] for group in groups])
    cap = max(size * costs.mean(), costs.max())
    made = []
    for rank in range(2):
        sampler = LoadBalancingDistributedSampler(range(len(costs)), costs, 2, rank)
        made.append(list(LoadBalancingDistributedBatchSampler(sampler, cap)))
    balanced = seconds(made)
    return {"over_random": dealt(order) / balanced, "over_grouped": dealt(ranked) / balanced}


def order(samples: int) -> dict[str, float]:
    """Seconds to make an epoch, and to sort, in turns."""
    costs = np.exp(np.random.default_rng(0).standard_normal(samples))
    sampler = LoadBalancingDistributedSampler(range(samples), costs, 4, 0)
    keys, found = costs.astype(np.float32), {"epoch": [0.0], "random_level": [0.0], "argsort": [0.0]}
    loose = LoadBalancingDistributedSampler(range(samples), costs, 4, 0, random_level=0.1)

    def took(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    for epoch in range(1, ROUNDS + 1):
        found["epoch"].append(took(lambda epoch=epoch: sampler.items(epoch)[::4]))  # type: ignore[misc]
        found["random_level"].append(took(lambda epoch=epoch: loose.items(epoch)[::4]))  # type: ignore[misc]
        found["argsort"].append(took(lambda: np.argsort(keys)))
    seconds = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {**seconds, "over_argsort": max(seconds["epoch"], seconds["random_level"]) / seconds["argsort"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the epoch whose order is timed")
    options = parser.parse_args()
    name, costs = lengths()
    epochs = range(3)
    report: dict[str, Any] = {
        "machine": speed.machine(),
        "lengths": {
            "of": name,
            "samples": len(costs),
            "median": float(np.median(costs)),
            "largest": float(costs.max()),
        },
        "balance": {
            "ranks": RANKS,
            "ours": statistics.fmean(imbalance(costs, ours(costs, RANKS, epoch)) for epoch in epochs),
            "distributed_sampler": statistics.fmean(imbalance(costs, plain(costs, RANKS, epoch)) for epoch in epochs),
        },
        "batches": batches(costs),
        "order": {"samples": options.samples, **order(options.samples)},
        "throughput": throughput(costs),
    }
    table = Table(title=f"{len(costs)} samples: {name}", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for group in ("balance", "batches", "order", "throughput"):
        for key, value in report[group].items():
            if isinstance(value, int | float):
                table.add_row(f"{group}: {key}", f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    speed.console().print(table)
    if options.output:
        speed.write(options.output, report)


if __name__ == "__main__":
    main()
