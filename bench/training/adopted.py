"""What it gains that the memory of a gradient becomes a bucket's: `python -m bench.training.adopted [--output FILE]`.

Two processes train two copies of one model with exact means of gradients, in turns of one step. In one copy the gradient of a
large tensor becomes its bucket (`Exchange.takes_memory`). In the other it is copied into a bucket. No link is limited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.testing import run_processes
from bench import speed
from bench.training.models import batch, model

RANKS, WARM = 2, 3


class CopiedMean(Mean):
    """The mean of a bucket into which gradients are copied."""

    takes_memory = False


class CopiedAllReduce(GradientAllReduce):
    """Exact means of buckets into which gradients are copied."""

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return CopiedMean(bucket, communicator)


def rank(name: str, steps: int) -> None:
    """Trains both copies; rank 0 prints the seconds of the steps of each."""
    torch.set_num_threads(1)
    communicator = comm.init()
    inputs, classes = batch(name, communicator.rank)
    copies = {}
    for kind in (GradientAllReduce, CopiedAllReduce):
        wrapped = kind(model(name))
        copies[kind.__name__] = wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {kind: [] for kind in copies}
    for step in range(WARM + steps):
        for kind, (wrapped, optimizer) in copies.items():
            communicator.barrier().wait()
            begin = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(inputs), classes).backward()
            optimizer.step()
            if step >= WARM:
                seconds[kind].append(time.perf_counter() - begin)
    if communicator.rank == 0:
        print(json.dumps(seconds))
    comm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["fc", "tr", "resnet18"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        (first, *_) = run_processes(rank, RANKS, args=(name, options.steps), timeout=600)
        taken, copied = json.loads(first.stdout.splitlines()[-1]).values()
        # Steps of a turn lie side by side, so that noise of the machine is in both.
        ratios = sorted(b / a for a, b in zip(taken, copied, strict=True))
        middle, quartiles = statistics.median(ratios), statistics.quantiles(ratios, n=4)
        rows.append({"model": name, "step_s": statistics.median(taken), "gain": middle, "quartiles": quartiles})
        spread = f"quartiles {quartiles[0]:.3f} and {quartiles[2]:.3f}"
        print(f"{name}: {statistics.median(taken):.4f} s, {middle:.3f} times as fast, {spread}")
    if options.output:
        speed.write(options.output, {"machine": speed.machine(), "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
