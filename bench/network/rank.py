"""One rank of a network benchmark: tunes, runs the given cases with rivals in turns, and prints seconds."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bagua_kernels import comm
from bagua_kernels.comm.compressed import CompressedAllReduce
from bagua_kernels.compression import from_spec

Call = Callable[[], object]


def rivals(c: comm.Communicator, operation: str, nbytes: int, names: list[str]) -> dict[str, Call]:
    """The ways of an operation on `nbytes` bytes of float32 per rank (for an all-reduce: of the whole vector)."""
    n, size = max(1, nbytes // 4), c.size
    x, wide = torch.ones(n), torch.ones(n * size) if operation not in ("all_reduce", "broadcast") else torch.ones(0)
    out = torch.empty_like(wide)
    gloo: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, wide, dist.ReduceOp.MAX),
        "all_to_all": lambda: dist.all_to_all_single(out, wide),
    }
    ours: dict[str, Call] = {
        "all_reduce": lambda: c.all_reduce(x, comm.ReduceOp.MAX).wait(),
        "broadcast": lambda: c.broadcast(x, 0).wait(),
        "all_gather": lambda: c.all_gather(out, x).wait(),
        "reduce_scatter": lambda: c.reduce_scatter(x, wide, comm.ReduceOp.MAX).wait(),
        "all_to_all": lambda: c.all_to_all(out, wide).wait(),
    }
    calls: dict[str, Call] = {}
    for name in names:
        if name in ("gloo", "ours"):
            calls[name] = (gloo if name == "gloo" else ours)[operation]
        else:
            compressed = CompressedAllReduce(from_spec(name), c, n)
            calls[name] = lambda compressed=compressed: compressed(x, seed=0)  # type: ignore[misc]
    return calls


def together(c: comm.Communicator) -> float:
    """Waits for a moment that all ranks have agreed on; the hosts are emulated, so they have one clock.

    After a barrier alone, ranks would start up to a one-way delay apart, and every time would contain that.
    """
    moment = torch.tensor([time.monotonic()], dtype=torch.float64)
    c.all_reduce(moment, comm.ReduceOp.MAX).wait()
    start = moment.item() + 0.05
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def measure(c: comm.Communicator, calls: dict[str, Call], rounds: int, order: random.Random) -> dict[str, Any]:
    """Times rivals in rounds; the order in a round is random, the same everywhere.

    Returns:
        `seconds`: for each rival the median over rounds of the seconds until the last rank is done. `interval`, if both
        ran: the 95 % interval of the ratio ours / Gloo (bootstrap over rounds).
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in order.sample(sorted(calls), len(calls)):
            started = together(c)
            calls[name]()
            if number:
                taken[name].append(time.monotonic() - started)
    everyone = c.all_gather_object(taken)
    slowest = {name: [max(times) for times in zip(*(one[name] for one in everyone), strict=True)] for name in calls}
    told: dict[str, Any] = {"seconds": {name: statistics.median(times) for name, times in slowest.items()}}
    if {"gloo", "ours"} <= set(calls):
        told["interval"] = interval(np.array(slowest["ours"]), np.array(slowest["gloo"]))
    return told


def interval(ours: np.ndarray, gloo: np.ndarray, draws: int = 2000) -> list[float]:
    """Returns the 2.5 % and the 97.5 % quantile of the ratio of medians when rounds are drawn with replacement."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(draws, len(ours)))
    ratios = np.median(ours[drawn], axis=1) / np.median(gloo[drawn], axis=1)
    return [float(value) for value in np.quantile(ratios, (0.025, 0.975))]


def main() -> None:
    settings = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", FutureWarning)
    c = comm.init(timeout=300)
    tuning = comm.tune(budget=settings["budget"]) if settings["budget"] and c.size > 1 else None
    order, rows = random.Random(7), []
    for case in settings["cases"]:
        calls = rivals(c, case["operation"], case["bytes"], case["rivals"])
        rows.append({**case, **measure(c, calls, case["rounds"], order)})
    if c.rank == 0:
        chosen = json.loads(tuning.to_json()) if tuning else None
        print("RESULT", json.dumps({"rows": rows, "tuning": chosen}), flush=True)
    comm.shutdown()


if __name__ == "__main__":
    main()
