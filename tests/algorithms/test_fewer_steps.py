"""Ranks that have left out steps, with as many batches: calls of all ranks take part in the rounds of the others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError
from tests.grids import grid

SPECS = [
    "local_sgd:interval=3",
    "diloco:interval=2",
    "diloco:interval=3,delay=2",
    "slow_mo:interval=3",
    "sparse_loco:interval=2",
    "decentralized",
    "d2",
    "sgp",
    "lowprec",
]
CALLS = ["synchronize", "close", "averaged", "consensus", "algorithm_state_dict"]


@grid(spec=SPECS, call=CALLS, left_out=[1, 4])
def test_a_rank_that_leaves_out_steps(spec: str, call: str, left_out: int) -> None:
    """As a loop does that leaves out batches whose loss is not finite."""

    def rank(communicator: Communicator) -> torch.Tensor:
        net = nn.Linear(70, 70)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model = from_spec(spec, net, optimizer, communicator=communicator)
        for step in range(7):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 70) * (step + communicator.rank)).square().mean()
            if communicator.rank == 1 and step < left_out:
                continue
            loss.backward()
            optimizer.step()
        if call == "averaged":
            with model.averaged():
                pass
        elif call != "close":
            getattr(model, call)()
            model.synchronize()
        model.close()
        return net.weight.detach().clone()

    found = run_ranks(3, rank, timeout=20)
    if call not in ("close", "averaged"):
        assert torch.equal(found[0], found[1])


def wrapped(communicator: Communicator, spec: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return from_spec(spec, net, optimizer, communicator=communicator), optimizer


def test_another_call_is_named() -> None:
    def rank(communicator: Communicator) -> str:
        model, _ = wrapped(communicator, "local_sgd:interval=3")
        with pytest.raises(CommunicationError) as caught:
            getattr(model, ("synchronize", "consensus")[communicator.rank])()
        return f"{type(caught.value).__name__}: {caught.value}"

    found = run_ranks(2, rank, timeout=5)
    assert any(text.startswith(MismatchError.__name__) for text in found)
    assert any("rank 0 is in synchronize()" in text or "rank 0 in synchronize()" in text for text in found)


def test_a_rank_that_trains_on_is_named() -> None:
    told = threading.Event()

    def rank(communicator: Communicator) -> str:
        model, _ = wrapped(communicator, "local_sgd:interval=3")
        if communicator.rank:
            assert told.wait(30)
            return ""
        with pytest.raises(CollectiveTimeoutError, match=r"rank 0 is in synchronize\(\), and rank 1 trains") as caught:
            model.synchronize()
        told.set()
        assert caught.value.ranks == (1,)
        return "told"

    assert run_ranks(2, rank, timeout=1.5) == ["told", ""]
