"""Kills ranks of a job and starts others in their place; measures how long the rest wait.

python -m bench.healing [--kills 12] [--specs bytegrad decentralized diloco:interval=4] [--output bench/results/healing.json]

Four processes of this machine train a small network, on loopback and with default settings. Each rank is killed in turn, by
SIGKILL, the one of rank 0 too. After a second another process joins. Two times are measured for each of them:

- loss: from the kill to the next step that any other rank finishes, of those that wait.
- join: the longest time between two steps of the others, beside the median one, and from the start of the process to its first
  step. Processes are copies of one that has imported PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.testing.processes import Processes, free_port

RANKS = 4
SECRET = {"BAGUA_KERNELS_SECRET": "of this benchmark alone"}
_PAUSE = 1.0  # seconds between a kill, or the first step of a new rank, and what follows
_LIMIT = 120.0  # seconds for a rank to come to a step


def doors(port: int) -> str:
    """Returns where members may listen, of which each takes the next free port."""
    return ",".join(f"127.0.0.1:{port + at}" for at in range(2 * RANKS))


def trains(spec: str, port: int, joins: bool) -> None:
    """Trains until it is killed, or a line comes; prints the time of each step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    members = comm.init(elastic=True, listen=f"127.0.0.1:{port}", join=doors(port) if joins else None).members
    model = from_spec(spec, net, optimizer, on_failure="heal")
    generator = torch.Generator().manual_seed(members.name)
    while True:
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
        print("STEP", time.time(), members.epoch, comm.size(), flush=True)


def steps(processes: Processes, rank: int) -> list[tuple[float, int]]:
    """Returns when a rank has finished its steps, and among how many."""
    lines = [line.split() for line in processes.output(rank).splitlines() if line.startswith("STEP")]
    return [(float(line[1]), int(line[3])) for line in lines if len(line) == 4]


def until(processes: Processes, rank: int, size: int, begin: float) -> float:
    """Waits for the first step of a rank among so many, after a time; returns when that was."""
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        if found := [moment for moment, ranks in steps(processes, rank) if ranks == size and moment > begin]:
            return found[0]
        if processes.poll(rank) is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"no step of {size} ranks: {processes.output(rank)[-500:]}")


def measure(spec: str, kills: int) -> dict[str, Any]:
    """Returns the times of one job."""
    losses, joins, gaps, medians = list[float](), list[float](), list[float](), list[float]()
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Processes(trains, RANKS, args=[spec, port, False], env=SECRET))
        living = [(first, rank) for rank in range(RANKS)]
        for each in living:
            until(*each, RANKS, 0.0)
        for number in range(kills):
            time.sleep(_PAUSE)
            killed = living.pop(number % RANKS)
            begin = time.time()
            killed[0].send_signal(killed[1], signal.SIGKILL)
            losses.append(max(until(*each, RANKS - 1, begin) for each in living) - begin)
            time.sleep(_PAUSE)
            begin = time.time()
            new = stack.enter_context(Processes(trains, 1, args=[spec, port, True], env=SECRET))
            joins.append(until(new, 0, RANKS, begin) - begin)
            time.sleep(_PAUSE)
            for each in living:
                moments = [moment for moment, _ in steps(*each) if moment > begin - _PAUSE]
                between = [after - before for before, after in itertools.pairwise(moments)]
                medians.append(statistics.median(between))
                gaps.append(max(between))
            living.append((new, 0))
    return {
        "spec": spec,
        "ranks": RANKS,
        "kills": kills,
        "loss_seconds": {"median": statistics.median(losses), "worst": max(losses), "all": losses},
        "join_seconds": {"median": statistics.median(joins), "worst": max(joins)},
        "gap_seconds": {
            "median_step": statistics.median(medians),
            "median": statistics.median(gaps),
            "worst": max(gaps),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="of each job; 12 by default")
    parser.add_argument("--specs", nargs="+", default=["bytegrad", "decentralized", "diloco:interval=4"])
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    found = []
    print(f"{'':22} {'after a kill, s':>22} {'longest gap in a join, s':>26} {'step, s':>8}")
    print(f"{'':22} {'median':>11} {'worst':>10} {'median':>15} {'worst':>10}")
    for spec in options.specs:
        one = measure(spec, options.kills)
        found.append(one)
        loss, gap = one["loss_seconds"], one["gap_seconds"]
        print(
            f"{spec:22} {loss['median']:11.3f} {loss['worst']:10.3f} {gap['median']:15.3f} {gap['worst']:10.3f} "
            f"{gap['median_step']:8.3f}",
            flush=True,
        )
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
