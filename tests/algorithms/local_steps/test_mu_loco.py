"""MuLoCo: what it adds to DiLoCo is Muon, four bits, and other numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, DiLoCo, MuLoCo
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import flat
from tests.algorithms.ranks import batch, fill

pytestmark = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has no such class")


def net() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(7, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
    fill(module)
    return module


def train(model: Algorithm, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("size", [1, 3])
def test_is_diloco_with_its_numbers(size: int) -> None:
    def rank(communicator: Communicator, kind: Any, options: dict[str, Any]) -> torch.Tensor:
        module = net()
        optimizer = optim.muon_with_adamw(module)
        model = kind(module, optimizer, interval=2, communicator=communicator, **options)
        train(model, optimizer, communicator.rank, range(7))
        model.wait()
        model.close()
        return flat(module)

    numbers = {"outer_lr": "auto", "outer_momentum": "auto", "codec": "absmax_int4", "error_feedback": False}
    ours, theirs = run_ranks(size, rank, MuLoCo, {}), run_ranks(size, rank, DiLoCo, numbers)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    float32 = run_ranks(size, rank, MuLoCo, {"codec": None})
    assert torch.equal(ours[0], float32[0]) == (size == 1)


def test_resumed_bit_for_bit() -> None:
    def rank(communicator: Communicator, stops: tuple[int, ...]) -> torch.Tensor:
        state: Any = None
        begin = 0
        for end in stops:
            module = net()
            optimizer = optim.muon_with_adamw(module)
            model = MuLoCo(module, optimizer, interval=3, delay=1, communicator=communicator.duplicate())
            if state is not None:
                model.load_algorithm_state_dict(state)
            train(model, optimizer, communicator.rank, range(begin, end))
            state, begin = model.algorithm_state_dict(), end
            model.close()
        return flat(module)

    whole, resumed = (run_ranks(2, rank, stops) for stops in ((6, 11), (6, 8, 11)))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("make", [optim.Muon, torch.optim.SGD], ids=["Muon", "SGD"])
def test_an_optimizer_without_muon_is_refused(make: Any) -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Linear(4, 4, bias=False)
        optimizer = make(module.parameters(), lr=0.01)
        if make is optim.Muon:
            MuLoCo(module, optimizer, communicator=communicator).close()
            return
        with pytest.raises(TypeError, match=r"make one by bagua_kernels.optim.muon_with_adamw\(module\)"):
            MuLoCo(module, optimizer, communicator=communicator)

    run_ranks(1, rank)
