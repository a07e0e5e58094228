"""What the adviser counts is what leaves a node of several ranks."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.choosing.cost.facts import Job
from bagua_kernels.algorithms.choosing.cost.methods import Method, methods
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.hierarchical import TieredCommunicator
from tests.grids import grid

NODES = [[0, 1], [2, 3]]
SIDE = 512
# First steps that are not compressed, and shorter intervals.
OPTIONS = {
    "OneBitAdam": {"freeze_step": 1},
    "LocalSGD 16": {"interval": 2},
    "DiLoCo 30": {"interval": 2},
    "DiLoCo 30, 4 bits": {"interval": 2, "delay": 0},
    "SparseLoCo 30": {"interval": 2, "delay": 0},
    "Choco": {"eta": 0.5},
}
# DDP is not this package's, and averages beside training have rounds at times of their own.
KNOWN = {one.name: one for one in methods() if one.spec and one.when != "always"}


def sent(model: torch.nn.Module) -> int:
    """Bytes that this rank has sent to other nodes."""
    opened = model.local.opened if isinstance(model, ModelAlgorithm) else []
    found = [each for each in {*model._communicators(), *opened} if isinstance(each, TieredCommunicator)]
    across = sum(each._tiers.bytes_across for each in found)
    return across + (model.local.mailbox.bytes_sent if isinstance(model, ModelAlgorithm) else 0)


def measured(communicator: Communicator, method: Method) -> int:
    net = torch.nn.Linear(SIDE, SIDE, bias=False)
    own = None if method.spec == "onebit_adam" else torch.optim.SGD(net.parameters(), lr=1e-3)
    options = OPTIONS.get(method.name, {})
    model = from_spec(method.spec, net, own, communicator=communicator, nodes=NODES, **options)
    steps = int(options.get("interval", 1))
    generator, before = torch.Generator().manual_seed(communicator.rank), 0
    for step in range(3 * steps):
        if step == 2 * steps:
            model.wait()
            before = sent(model)
        model(torch.randn(2, SIDE, generator=generator)).square().mean().backward()
        (own or model.optimizer).step()
        (own or model.optimizer).zero_grad()
    model.wait()
    after = sent(model)
    model.close()
    return after - before


@grid(cover=1, name=sorted(KNOWN))
def test_the_adviser_counts_what_leaves_a_node(name: str) -> None:
    method = KNOWN[name]
    counted = run_ranks(4, measured, method)
    for node in NODES:
        assert sum(counted[rank] for rank in node) == pytest.approx(
            method.sent(Job(1.0, ((SIDE, SIDE),)), len(NODES)), rel=0.03
        )
