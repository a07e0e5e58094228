"""States that earlier versions wrote: training goes on from them bit for bit.

`python -m tests.algorithms.test_earlier_states` writes them anew, which is only for a version whose states are a new format.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Algorithm, CompressedAllReduce, Guard, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.exact_training import Sums, stored, uniform
from tests.grids import grid

FOLDER = Path(__file__).parent / "states"
GUARDED = "guarded"
SPECS = {
    "allreduce": "allreduce",
    "bytegrad": "bytegrad:block=32,error_feedback=True",
    "sign": "sign:min_numel=0",
    "onebit": "onebit:warmup_steps=1",
    "topk": "topk:ratio=0.2,min_numel=0,exact=none",
    "randomk": "randomk:ratio=0.2",
    "dgc": "dgc:ratio=0.2,min_numel=0,nesterov=True,masking=True",
    "double_squeeze": "double_squeeze:min_numel=0,exact=none",
    "terngrad": "terngrad:block=32",
    "powersgd": "powersgd:rank=2,min_compression=0.5",
    "powersgd_in_turn": "powersgd:rank=2,min_compression=0.5,alternate=True",
    "onebit_adam": "onebit_adam:freeze_step=2",
    "qadam": "qadam:freeze_step=2",
    GUARDED: "",
}
BEFORE, AFTER = 3, 3
SHAPES = [(9, 7), (9,), (13, 9), (300,), ()]


def wrap(name: str, communicator: Communicator) -> tuple[Algorithm, torch.optim.Optimizer]:
    module, options = Sums(SHAPES), {"communicator": communicator, "bucket_bytes": 700}
    if name == GUARDED:
        guard = Guard(every=1, bound=0.5, action="widen")
        algorithm: Algorithm = CompressedAllReduce(
            module, codec="minmax_uint2:block=32", guard=guard, error_feedback=True, **options
        )
    else:
        algorithm = from_spec(SPECS[name], module, **options)
    own = getattr(algorithm, "optimizer", None)
    # Products with a power of two are exact, fused or not.
    return algorithm, own or torch.optim.SGD(module.parameters(), lr=0.125)


def train(algorithm: Algorithm, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        inputs = [uniform(p.shape, 1000 + 100 * step + 10 * rank + i) for i, p in enumerate(algorithm.parameters())]
        algorithm(inputs).backward()
        optimizer.step()


def parameters(algorithm: Algorithm) -> list[torch.Tensor]:
    return [p.detach().clone() for p in algorithm.parameters()]


def written(communicator: Communicator, name: str) -> dict[str, Any]:
    algorithm, optimizer = wrap(name, communicator)
    train(algorithm, optimizer, communicator.rank, 0, BEFORE)
    state = algorithm.algorithm_state_dict()
    found = {"algorithm": state, "optimizer": optimizer.state_dict(), "parameters": parameters(algorithm)}
    found = stored(found)  # training changes what it refers to
    train(algorithm, optimizer, communicator.rank, BEFORE, BEFORE + AFTER)
    found["expected"] = parameters(algorithm)
    algorithm.close()
    return found


def resumed(communicator: Communicator, name: str, saved: list[dict[str, Any]]) -> list[torch.Tensor]:
    own = saved[communicator.rank]
    algorithm, optimizer = wrap(name, communicator)
    with torch.no_grad():
        for p, value in zip(algorithm.parameters(), own["parameters"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(own["optimizer"])
    algorithm.load_algorithm_state_dict(own["algorithm"])
    train(algorithm, optimizer, communicator.rank, BEFORE, BEFORE + AFTER)
    found = parameters(algorithm)
    algorithm.close()
    return found


# Low ranks are equal to the bit on compiled kernels only: without them, torch.bmm adds in another order.
NAMES = [pytest.param(name, marks=[pytest.mark.compiled] * name.startswith("powersgd")) for name in SPECS]


@grid(cover=1, name=NAMES)
def test_training_goes_on(name: str) -> None:
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    for rank, found in enumerate(run_ranks(2, resumed, name, saved)):
        for value, expected in zip(found, saved[rank]["expected"], strict=True):
            assert torch.equal(value, expected)


if __name__ == "__main__":
    for each in sys.argv[1:] or SPECS:
        torch.save(run_ranks(2, written, each), FOLDER / f"{each}.pt")
