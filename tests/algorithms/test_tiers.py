"""Every algorithm on nodes of several ranks: what it trains, what leaves a node, and that ranks stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.hierarchical import TieredCommunicator
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

EVEN = [[0, 1], [2, 3]]
LAYOUTS = [EVEN, [[0], [1, 2], [3, 4, 5, 6]], [[0, 4], [1, 5], [2, 6], [3, 7]]]
GRADIENTS = [
    "allreduce",
    "bytegrad:block=64",
    "fp8",
    "qsgd",
    "natural",
    "terngrad",
    "onebit",
    "double_squeeze",
    "sign",
    "topk:ratio=0.2",
    "randomk:ratio=0.5",
    "dgc:ratio=0.2",
    "powersgd:rank=2",
    "compressed:codec=cast",
    "onebit_adam:freeze_step=2",
    "qadam:freeze_step=2",
]
MODELS = [
    "decentralized",
    "decentralized:peers=ring",
    "sgp",
    "d2:peers=lazy_ring",
    "lowprec",
    "choco:eta=0.5",
    "local_sgd:interval=2",
    "post_local_sgd:interval=2",
    "slow_mo:interval=2",
    "diloco:interval=2",
    "diloco:interval=2,codec=absmax_int8,delay=1",
    "mu_loco:interval=2",
    "sparse_loco:interval=2",
    "async_model_average:interval=2",
    "wagma:period=3",
]


def optimizer_for(spec: str, net: torch.nn.Module) -> torch.optim.Optimizer | None:
    if spec.startswith(("qadam", "onebit_adam")):
        return None
    if spec.startswith("mu_loco"):
        return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2 and p.requires_grad], lr=1e-2)
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def train(communicator: Communicator, spec: str, steps: int, options: dict[str, Any]) -> list[torch.Tensor]:
    net: torch.nn.Module = Odd()
    if spec.startswith("mu_loco"):
        net = torch.nn.Sequential(
            torch.nn.Linear(7, 31, bias=False), torch.nn.Tanh(), torch.nn.Linear(31, 13, bias=False)
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.rand(p.shape, generator=generator) - 0.4)
    optimizer = optimizer_for(spec, net)
    model = from_spec(spec, net, optimizer, communicator=communicator, **options)
    for step in range(steps):
        model(batch(communicator.rank, step)).square().mean().backward()
        (optimizer or model.optimizer).step()
        (optimizer or model.optimizer).zero_grad()
    if nodes := options.get("nodes"):
        uneven = model.needs_even_nodes and len({len(node) for node in nodes}) > 1
        assert isinstance(model.communicator, TieredCommunicator) != uneven
    if spec in MODELS:
        model.synchronize()
    model.close()
    return [p.detach().clone() for p in net.parameters()]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm())


@grid(cover=1, spec=[*GRADIENTS, *MODELS], layout=LAYOUTS)
def test_nodes_train_as_one_tier_does(spec: str, layout: list[list[int]]) -> None:
    size, steps = sum(map(len, layout)), 4
    found = run_ranks(size, train, spec, steps, {"nodes": layout})
    assert all(torch.equal(x, y) for other in found for x, y in zip(other, found[0], strict=True))
    flat = run_ranks(size, train, spec, steps, {"hierarchical": False})[0]
    start = run_ranks(2, train, "allreduce" if not spec.startswith("mu_loco") else spec, 0, {"hierarchical": False})[0]
    moved = distance(flat, start)
    # Codecs round other values; gossip and averages beside training mix in another order.
    assert distance(found[0], flat) <= (1e-5 if spec in ("allreduce", "local_sgd:interval=2") else 0.5) * moved


@pytest.mark.parametrize(
    "spec", ["sign:majority_vote=true", "dgc:masking=true", "diloco:quorum=1", "async_decentralized"]
)
def test_algorithms_of_one_tier_refuse_two_in_a_sentence(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="leave out hierarchical"):
            train(communicator, spec, 0, {"hierarchical": True, "nodes": EVEN})
        net = Odd()
        model = from_spec(spec, net, optimizer_for(spec, net), communicator=communicator, nodes=EVEN)
        assert not isinstance(model.communicator, TieredCommunicator)
        model.close()

    run_ranks(4, rank)


def test_one_node_and_nodes_of_one_rank_have_one_tier() -> None:
    def rank(communicator: Communicator, nodes: list[list[int]] | None) -> bool:
        model = from_spec("bytegrad", Odd(), communicator=communicator, hierarchical=True, nodes=nodes)
        model.close()
        return isinstance(model.communicator, TieredCommunicator)

    assert run_ranks(2, rank, [[0, 1]]) == [False] * 2
    assert run_ranks(2, rank, [[0], [1]]) == [False] * 2
    assert run_ranks(2, rank, None) == [False] * 2  # threads share a host
