"""Accuracy of DDP with 8 bits by one added line: `python -m bench.convergence.hook_quality [--output …/hook_quality.json]`.

Two processes train the network of the example on Fashion-MNIST for one epoch. They do so with `DistributedDataParallel` as it is
and with a hook, from the same start on the same examples. All ranks have to end with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import comm
from bagua_kernels.algorithms import ddp
from bagua_kernels.comm.testing import run_processes
from bench.convergence.dealing import order_of
from bench.convergence.measure import evaluate, take_steps
from bench.convergence.tasks import TASKS

RANKS, BATCH, SEEDS = 2, 32, 3
HOOK = "absmax_int8:block=256"
POINTS = 0.5


def on_rank(hook: str, seed: int) -> None:
    """One rank: trains, and prints the accuracy."""
    comm.init(timeout=60)
    torch.set_num_threads(1)
    task = TASKS["fashion"]
    data = task.data()
    torch.manual_seed(seed)
    module = task.model()
    model = DistributedDataParallel(module)
    if hook:
        model.register_comm_hook(None, ddp.hook(hook, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate)
    order = order_of(len(data.x), task, task.steps, seed).view(task.steps, RANKS, BATCH)
    take_steps(model, optimizer, task, data, order[:, comm.rank()])
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    same = len({*comm.world().all_gather_object(bits)}) == 1
    if comm.rank() == 0:
        loss, accuracy = evaluate(task, module, data.test_x, data.test_y)
        print("FOUND", json.dumps({"accuracy": accuracy, "loss": loss, "same_bits": same}), flush=True)
    comm.shutdown()


def trained(hook: str, seed: int) -> dict[str, Any]:
    """What a run has found."""
    results = run_processes(on_rank, RANKS, args=(hook, seed), timeout=900)
    if bad := [one for one in results if one.returncode]:
        raise RuntimeError(f"training failed:\n{bad[0].stdout}\n{bad[0].stderr}")
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    rows = [{"seed": seed, "ddp": trained("", seed), "hook": trained(HOOK, seed)} for seed in range(SEEDS)]
    points = [100 * (row["hook"]["accuracy"] - row["ddp"]["accuracy"]) for row in rows]
    table = Table(title=f"test accuracy, {RANKS} ranks, one epoch of Fashion-MNIST", title_justify="left")
    for column in ("seed", "DDP", HOOK, "points", "same bits on all ranks"):
        table.add_column(column, justify="right")
    for row, difference in zip(rows, points, strict=True):
        same = row["ddp"]["same_bits"] and row["hook"]["same_bits"]
        accuracies = f"{row['ddp']['accuracy']:.2%}", f"{row['hook']['accuracy']:.2%}"
        table.add_row(str(row["seed"]), *accuracies, f"{difference:+.2f}", str(same))
    mean = statistics.fmean(points)
    console = Console()
    console.print(table)
    console.print(f"mean {mean:+.2f} points; at least -{POINTS}: {mean >= -POINTS}")
    if options.output:
        told = {"hook": HOOK, "ranks": RANKS, "batch": BATCH, "rows": rows, "points": mean, "least": -POINTS}
        options.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
