"""Large models on slow links, with the default timeout: `python -m bench.training.slow_start [--output …/slow_start.json]`.

Two hosts of a lab (`bench.netlab`) are joined by a link of 10 Mbit/s. A model of 124 million parameters takes seven minutes,
more than the timeout of five. It is wrapped with equal seeds and with other ones, and trained for some steps by algorithms that
send models. Each part is a job of its own. `--parameters` and `--rate` scale it, and `BAGUA_KERNELS_TIMEOUT` the timeout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagua_kernels import comm, knobs
from bagua_kernels.algorithms import (
    Algorithm,
    AsyncDecentralized,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    ModelAlgorithm,
)
from bench import speed
from bench.netlab import lab as netlab

PARAMETERS, RATE, HOSTS = 124_000_000, 10.0, 2
STEPS = 3
EQUAL = 15.0  # seconds that the start of an equal model may take
_SHARE = 4.0  # how many times the longest part sends and receives the model, with room to spare
_REST = 120.0  # seconds for all else


def model(parameters: int, seed: int) -> torch.nn.Module:
    """Square layers, about as many as a transformer of that size has."""
    torch.manual_seed(seed)
    layers = max(1, min(30, parameters // 100_000))
    width = max(1, round((parameters / layers) ** 0.5))
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])


def train(wrapper: Algorithm, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Takes some steps on random data."""
    width = next(wrapper.parameters()).shape[1]
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.randn(1, width)).square().mean().backward()
        optimizer.step()


def decentralized(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Algorithm:
    return Decentralized(net, optimizer)


def async_decentralized(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Algorithm:
    return AsyncDecentralized(net, optimizer)


def async_model_average(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Algorithm:
    return AsyncModelAverage(net, optimizer)


def diloco(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Algorithm:
    return DiLoCo(net, optimizer, interval=STEPS, codec="minmax_uint8")


# How a model is wrapped, whether ranks have other seeds, steps, and whether `synchronize` is called.
PARTS: dict[str, tuple[Callable[..., Algorithm], bool, int, bool]] = {
    "start, equal seeds": (decentralized, False, 0, False),
    "start, other seeds": (decentralized, True, 0, False),
    "Decentralized": (decentralized, False, STEPS, True),
    "AsyncDecentralized": (async_decentralized, False, STEPS, True),
    "AsyncModelAverage": (async_model_average, False, STEPS, True),
    "DiLoCo, 8 bits, two rounds": (diloco, False, 2 * STEPS, False),
}


def on_rank(part: str, parameters: int) -> None:
    """One rank of one part; prints its figures."""
    torch.set_num_threads(1)
    make, other, steps, synchronizes = PARTS[part]
    world = comm.init()
    net = model(parameters, seed=world.rank if other else 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    world.barrier().wait()
    seconds, began = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name], began = time.monotonic() - began, time.monotonic()

    wrapper = make(net, optimizer)
    lap("start")
    if not steps:
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().data)
        if len(set(world.all_gather_object(digest.hexdigest()))) > 1:
            raise SystemExit("the ranks have different models after the start")
    torch.manual_seed(100 + world.rank)
    train(wrapper, optimizer, steps)
    lap("steps")
    if synchronizes:
        assert isinstance(wrapper, ModelAlgorithm | AsyncDecentralized | AsyncModelAverage)
        wrapper.synchronize()
        lap("synchronize")
    wrapper.close()
    lap("close")
    comm.shutdown()
    print(json.dumps(seconds), flush=True)


def measure(lab: netlab.Lab, part: str, parameters: int, limit: float) -> dict[str, Any]:
    """Runs one part; returns the seconds of rank 0, or why it failed."""
    command = [sys.executable, "-m", "bench.training.slow_start", "--part", part, "--parameters", str(parameters)]
    row: dict[str, Any] = {"name": part}
    for result in lab.run(command, timeout=limit):
        if result.ended or result.returncode:
            how = "was ended at the limit" if result.ended else f"gave {result.returncode}"
            told = ": ".join([f"rank {result.rank} {how}", *result.stderr.strip().splitlines()[-1:]])
            row["error"] = f"{row['error']}; {told}" if "error" in row else told
        elif result.rank == 0:
            row["seconds"] = json.loads(result.stdout.splitlines()[-1])
            row["told"] = [line for line in result.stderr.splitlines() if "is being sent" in line][:1]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rate", type=float, default=RATE, help="Mbit/s")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    if given.part:
        on_rank(given.part, given.parameters)
        return
    if reason := netlab.available(delay=False):
        raise SystemExit(f"no lab here: {reason}")
    once = 32e-6 * given.parameters / given.rate
    rows = []
    with netlab.Lab(HOSTS, given.rate) as lab:
        for part in given.parts:
            steps = PARTS[part][2]
            rows.append(measure(lab, part, given.parameters, _REST + _SHARE * once * (1 + steps)))
            print(json.dumps(rows[-1]), flush=True)
    title = f"{given.parameters / 1e6:.3g} million parameters at {given.rate:g} Mbit/s: sent once in {once:.0f} s"
    table = Table(title=f"{title}, timeout {knobs.TIMEOUT.get():g} s")
    for column in ("part", "start", "steps", "synchronize", "close", "result"):
        table.add_column(column, justify="left" if column in ("part", "result") else "right")
    for row in rows:
        seconds = row.get("seconds", {})
        times = [
            f"{seconds[name]:.1f}" if name in seconds else "" for name in ("start", "steps", "synchronize", "close")
        ]
        table.add_row(row["name"], *times, row.get("error", "done"))
    speed.console().print(table)
    if given.output:
        figures = {
            "parameters": given.parameters,
            "rate": given.rate,
            "timeout": knobs.TIMEOUT.get(),
            "seconds_once": once,
        }
        speed.write(given.output, {**figures, "rows": rows, "machine": speed.machine()})
    failed = [row["name"] for row in rows if "error" in row]
    slow = [row["name"] for row in rows if row.get("seconds", {}).get("start", 0.0) > EQUAL and "equal" in row["name"]]
    if failed or slow:
        raise SystemExit(f"failed: {failed}; too slow: {slow}")


if __name__ == "__main__":
    main()
