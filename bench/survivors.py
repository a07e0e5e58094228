"""What kills cost in accuracy, for every algorithm that heals: `python -m bench.survivors [--output FILE]`.

Four ranks, which are threads, train a small network, each with samples of its own. In the second run two of them end without a
word, after a third and after two thirds of the steps. The loss is that of the mean model, over the samples of the two that are
left. It is compared with the loss over the same samples after the undisturbed run. A row has the ratios of six pairs of victims,
rank 0 among them, for some orders of the samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, Membership, run_ranks
from bagua_kernels.optim import muon_with_adamw

RANKS, STEPS, BATCH, SAMPLES = 4, 240, 16, 512
SPECS = (
    "allreduce",
    "bytegrad",
    "qsgd",
    "onebit:min_numel=0,exact=none,warmup_steps=0",
    "sign:min_numel=0",
    "terngrad",
    "natural",
    "fp8",
    "double_squeeze:min_numel=0",
    "topk:ratio=0.1,min_numel=0",
    "randomk:min_numel=0",
    "dgc:min_numel=0",
    "powersgd:rank=2",
    "qadam:freeze_step=40,lr=0.003",
    "onebit_adam:freeze_step=40,lr=0.003,min_numel=0",
    "decentralized",
    "lowprec",
    "choco:eta=0.4",
    "d2",
    "sgp",
    "local_sgd:interval=5",
    "post_local_sgd:interval=5",
    "diloco:interval=10",
    "slow_mo:interval=5",
    "mu_loco:interval=10",
    "sparse_loco:interval=10",
    "async_model_average",
    "async_decentralized",
    "wagma",
)
_MAKERS = ("qadam", "onebit_adam")  # of their optimizers


def samples(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of eight classes, which all ranks have alike."""
    centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1 + rank))
    return x, torch.cdist(x, centres).argmin(1)


def trains(communicator: Communicator, spec: str, ends: dict[int, int], seed: int) -> dict[str, torch.Tensor] | None:
    """One rank: returns the mean model, or None if it has ended before."""
    members = Membership(communicator)
    start = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=start) / 8)
    # Steps of momentum 0.9 are ten times as long in the end.
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.01 if spec.startswith("dgc") else 0.1)
    if spec.startswith("mu_loco"):
        optimizer = muon_with_adamw(net, lr=0.02)
    given = [] if spec.startswith(_MAKERS) else [optimizer]
    model = from_spec(spec, net, *given, communicator=members.communicator, on_failure="heal")
    x, y = samples(members.name)
    generator = torch.Generator().manual_seed(RANKS * seed + members.name)
    for step in range(STEPS):
        if ends.get(members.name) == step:
            return None
        rows = torch.randint(SAMPLES, (BATCH,), generator=generator)
        (model.optimizer or optimizer).zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        (model.optimizer or optimizer).step()
    model.synchronize()
    found = {name: value.clone() for name, value in net.state_dict().items()}
    model.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def loss(state: dict[str, torch.Tensor], ranks: Sequence[int]) -> float:
    """Returns the loss of a model over the samples of some ranks."""
    parts = [samples(rank) for rank in ranks]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    hidden = torch.tanh(F.linear(x, state["0.weight"], state["0.bias"]))
    return F.cross_entropy(F.linear(hidden, state["2.weight"], state["2.bias"]), y).item()


def run(spec: str, ends: dict[int, int], seed: int) -> dict[str, torch.Tensor]:
    """Returns the mean model that the ranks which are left come to."""
    return next(each for each in run_ranks(RANKS, trains, spec, ends, seed, timeout=60.0) if each is not None)


def measure(spec: str, seeds: int) -> dict[str, Any]:
    """Returns the ratios of one algorithm."""
    rows = []
    for seed in range(seeds):
        plain = run(spec, {}, seed)
        for victims in itertools.combinations(range(RANKS), 2):
            found = run(spec, dict(zip(victims, (STEPS // 3, 2 * STEPS // 3), strict=True)), seed)
            left = [rank for rank in range(RANKS) if rank not in victims]
            told = {"loss": loss(found, left), "undisturbed": loss(plain, left)}
            rows.append({"seed": seed, "victims": victims, **told})
    ratios = [row["loss"] / row["undisturbed"] for row in rows]
    return {"spec": spec, "median": statistics.median(ratios), "worst": max(ratios), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", nargs="+", default=SPECS, help="of algorithms")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the samples; 3 by default")
    parser.add_argument("--output", type=Path, help="a JSON file; rows that are not measured anew stay")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("bagua_kernels").setLevel(logging.ERROR)
    rows = json.loads(options.output.read_text()) if options.output is not None and options.output.exists() else []
    found = {row["spec"]: row for row in rows}
    print(f"{'':36} {'median':>8} {'worst':>8}")
    for spec in options.specs:
        one = measure(spec, options.seeds)
        found[spec] = one
        print(f"{spec:36} {one['median']:8.3f} {one['worst']:8.3f}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps([*found.values()], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
