"""Ranges by which `torch.profiler` shows each exchange, of every algorithm."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Algorithm, from_spec, names
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.optim import ChainedOptimizer
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

RANKS, STEPS = 2, 4
# Rounds that come within the steps, and averages that depend on no clock.
OPTIONS: dict[str, dict[str, Any]] = {
    "async_model_average": {"interval_ms": None, "interval": 1, "warmup_steps": 0},
    **{each: {"interval": 2} for each in ("diloco", "local_sgd", "slow_mo", "sparse_loco", "mu_loco")},
    "onebit_adam": {"freeze_step": 2},
}


def train(c: Communicator, name: str) -> int:
    """Trains for a few steps and returns the number of exchanges that the algorithm has counted."""
    kind, _ = Algorithm.named(name)
    net = Odd()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer: Any = None
    if name == "mu_loco":
        matrices, others = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]
        optimizer = ChainedOptimizer(torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(others, lr=0.01))
    elif not issubclass(kind, MomentumAllReduce):
        optimizer = torch.optim.SGD(trained, lr=0.01)
    model = from_spec(name, net, optimizer, communicator=c, **OPTIONS.get(name, {}))
    step = 0
    # A courier asks beside training, on a busy machine after its end; ranks may take different numbers of steps then.
    while step < STEPS or (isinstance(model, CourierAlgorithm) and not model.stats().rounds):
        model(batch(c.rank, step)).square().mean().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        step += 1
    model.synchronize()
    stats = model.stats()
    model.close()
    return stats.rounds if isinstance(model, ModelAlgorithm) else stats.steps


@grid(name=names(), cover=1)
@pytest.mark.filterwarnings("ignore")
def test_each_exchange_has_a_range(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler sees ranges of threads that it was begun on only, so this test looks at what is recorded on all of them."""
    recorded: list[str] = []
    lock = threading.Lock()

    class Records(torch.profiler.record_function):
        def __init__(self, label: str, args: str | None = None) -> None:
            with lock:
                recorded.append(label)
            super().__init__(label, args)

    monkeypatch.setattr(torch.profiler, "record_function", Records)
    counted = run_ranks(RANKS, train, name)
    assert all(counted), "a test without an exchange shows nothing"
    ranges = [label for label in recorded if label.startswith(f"bagua_kernels {name}")]
    assert len(ranges) >= (max(counted) if issubclass(Algorithm.named(name)[0], CourierAlgorithm) else sum(counted))
    assert len(ranges) == len(recorded), "ranges of exchanges begin with the names of the package and of the algorithm"
