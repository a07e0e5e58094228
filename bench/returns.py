"""Ten kills and returns in one training: `python -m bench.returns [--kills 10] [--output bench/results/returns.json]`.

Four processes of this machine train a small network for some epochs, 2,000 steps without kills. In the second run each rank
is killed in turn, by SIGKILL, and another process joins a second later. Samples are dealt by a sampler that follows the
members, so that both runs take as many. The table has the loss over all data at the end of both, and the samples that were
lost or taken twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.testing.processes import Processes, free_port
from bagua_kernels.data import LoadBalancingDistributedSampler
from bench.healing import RANKS, SECRET, doors
from bench.waiting import until

BATCH, SAMPLES, EPOCHS = 8, 16_000, 4
_STEP = 0.02  # seconds of a step beside its arithmetic, so that processes start between two kills
_PAUSE = 1.0  # seconds between a kill and the start of another process
_LIMIT = 600.0  # seconds of a run


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points of eight classes, some of which lie between two."""
    generator = torch.Generator().manual_seed(0)
    x, centres = torch.randn(SAMPLES, 16, generator=generator), torch.randn(8, 16, generator=generator)
    return x, torch.cdist(x, centres).argmin(1)


def trains(spec: str, port: int, joins: bool) -> None:
    """One rank: prints the samples of each step, and at its end the loss of the mean model over all data."""
    torch.manual_seed(0)
    x, y = data()
    net = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    members = comm.init(elastic=True, listen=f"127.0.0.1:{port}", join=doors(port) if joins else None).members
    model = from_spec(spec, net, optimizer, on_failure="heal")
    sampler = LoadBalancingDistributedSampler(range(SAMPLES), [1.0] * SAMPLES)
    sampler.follow(model)
    indices: Any = range(SAMPLES)
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for drawn in DataLoader(indices, BATCH, sampler=sampler):
            rows = drawn.tolist()
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            time.sleep(_STEP)
            print("STEP", time.time(), len(members.ranks), epoch, *rows, "END", flush=True)
    model.synchronize()
    with torch.no_grad():
        loss = F.cross_entropy(net(x), y).item()
    print("LOSS", loss, members.losses, members.joins, flush=True)
    model.close()
    comm.shutdown()


def run(spec: str, kills: int) -> dict[str, Any]:
    """Returns the figures of one run."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Processes(trains, RANKS, args=[spec, port, False], env=SECRET))
        everyone = living = [(first, rank) for rank in range(RANKS)]
        for number in range(kills):
            # The kills are spread over the samples of all epochs, of which the last few are left in peace.
            share = (number + 1) / (kills + 4)
            newest = living[-1]
            printed = partial(newest[0].output, newest[1])
            until(lambda newest=newest, share=share: _done(newest) >= share, _LIMIT, printed)  # type: ignore[misc]
            killed = living[number % RANKS]
            killed[0].send_signal(killed[1], signal.SIGKILL)
            time.sleep(_PAUSE)
            new = (stack.enter_context(Processes(trains, 1, args=[spec, port, True], env=SECRET)), 0)
            living = [each for each in living if each is not killed] + [new]
            everyone = [*everyone, new]
            joined = partial(new[0].output, new[1])
            until(lambda joined=joined: "STEP" in joined(), _LIMIT, joined)  # type: ignore[misc]
        losses = []
        for processes, rank in living:
            (one,) = processes.wait(_LIMIT, [rank])
            if one.returncode:
                raise RuntimeError(f"a rank ended with {one.returncode}: {one.stderr[-2000:]}")
            losses += [float(line.split()[1]) for line in one.stdout.splitlines() if line.startswith("LOSS")]
        outputs = [processes.output(rank) for processes, rank in everyone]
    lines = [line.split() for text in outputs for line in text.splitlines() if line.startswith("STEP")]
    taken = Counter((int(line[3]), int(row)) for line in lines if line[-1] == "END" for row in line[4:-1])
    assert len({*losses}) == 1, losses
    return {
        "loss": losses[0],
        "samples": EPOCHS * SAMPLES,
        "lost": EPOCHS * SAMPLES - len(taken),
        "doubled": sum(count - 1 for count in taken.values()),
        "steps": len(lines),
    }


def _done(rank: tuple[Processes, int]) -> float:
    """Returns the share of the training that is behind a rank."""
    lines = [line.split() for line in rank[0].output(rank[1]).splitlines() if line.startswith("STEP") and "END" in line]
    # A rank that joined has none of the steps before.
    if not lines:
        return 0.0
    epoch = int(lines[-1][3])
    within = sum(int(line[2]) * BATCH for line in lines if line[3] == str(epoch)) / SAMPLES
    return (epoch + min(1.0, within)) / EPOCHS


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="10 by default")
    parser.add_argument("--specs", nargs="+", default=["bytegrad", "decentralized", "diloco:interval=10"])
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    found = []
    print(f"{'':20} {'loss':>8} {'without kills':>14} {'lost':>6} {'doubled':>8} of {EPOCHS * SAMPLES:,} samples")
    for spec in options.specs:
        quiet, hurt = run(spec, 0), run(spec, options.kills)
        found.append({"spec": spec, "kills": options.kills, "undisturbed": quiet, "disturbed": hurt})
        print(f"{spec:20} {hurt['loss']:8.4f} {quiet['loss']:14.4f} {hurt['lost']:6} {hurt['doubled']:8}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
