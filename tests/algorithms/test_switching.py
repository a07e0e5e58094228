"""Switches between algorithms: from each kind to each, and refused ones, after which training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import D2, Algorithm, GradientAllReduce, LocalSGD, ModelAlgorithm, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.grids import grid

KINDS = [
    "allreduce",
    "local_sgd:interval=2",
    "decentralized",
    "wagma",
    "async_model_average:interval=1",
    "async_decentralized",
]


def loss(model: Algorithm, communicator: Communicator, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + communicator.rank)
    return model(torch.randn(2, 5, generator=generator)).square().mean()


@grid(first=KINDS, second=KINDS)
def test_training_goes_on_from_the_mean(first: str, second: str) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        net = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = from_spec(first, net, optimizer, communicator=communicator)
        mean = torch.empty(0)
        for step in range(6):
            if step == 3:
                kind = Algorithm.registered[second.partition(":")[0]]
                on_parameters = issubclass(kind, ModelAlgorithm)
                model = model.switch_to(kind, **({"optimizer": optimizer} if on_parameters else {}))
                assert model.settled() is model
                mean = net.weight.detach().clone()
            optimizer.zero_grad()
            loss(model, communicator, step).backward()
            optimizer.step()
        model.close()
        return mean, net.weight.detach().clone()

    found = run_ranks(2, rank)
    assert torch.equal(found[0][0], found[1][0])
    assert all(not torch.equal(mean, last) for mean, last in found)


@grid(
    first=KINDS,
    second__options={
        "an option": (LocalSGD, {"interval": 0}),
        "a topology": (D2, {"peers": "ring"}),
        "a quorum": (LocalSGD, {"quorum": 9}),
    },
)
def test_training_goes_on_after_a_refusal(first: str, second: type[Algorithm], options: Mapping[str, Any]) -> None:
    """Some are refused when the parameters lie in the other one's buckets already."""

    def rank(communicator: Communicator) -> torch.Tensor:
        net = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = from_spec(first, net, optimizer, communicator=communicator)
        for step in range(6):
            if step == 3:
                with pytest.raises(ValueError, match=r"interval|topology|peers|D2|quorum"):
                    model.switch_to(second, optimizer=optimizer, **options)
            optimizer.zero_grad()
            loss(model, communicator, step).backward()
            optimizer.step()
        if isinstance(model, ModelAlgorithm):
            model.synchronize()
        else:
            assert isinstance(model, GradientAllReduce)
        model.close()
        return net.weight.detach().clone()

    weights = run_ranks(4, rank)
    for other in weights[1:]:
        assert torch.equal(weights[0], other)
