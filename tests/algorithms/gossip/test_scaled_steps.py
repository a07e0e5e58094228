"""Steps that a `GradScaler` leaves out: each is counted once, by the algorithm whose optimizer it was to be."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Choco, GradientAllReduce, from_spec
from bagua_kernels.comm import Communicator, run_ranks

SPECS = ["decentralized", "d2", "sgp", "lowprec", "choco:eta=0.5"]


class Loop:
    """Steps of a small module with a scaler, of which some overflow."""

    def __init__(self, communicator: Communicator, spec: str, scaler: torch.amp.GradScaler) -> None:
        self.scaler, self.rank = scaler, communicator.rank
        self.net = nn.Linear(5, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.model = from_spec(spec, self.net, self.optimizer, communicator=communicator, scaler=scaler)

    def step(self, number: int, overflows: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 5) * (number + self.rank)).square().mean()
        self.scaler.scale(loss * float("inf") if overflows else loss).backward()
        self.scaler.step(self.optimizer)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("call", ["synchronize"])
def test_the_last_step_of_all(spec: str, call: str) -> None:
    def rank(communicator: Communicator) -> tuple[int, torch.Tensor]:
        loop = Loop(communicator, spec, scaler())
        for number in range(4):
            loop.step(number, overflows=number == 3 and communicator.rank == 0)
            loop.scaler.update()
        getattr(loop.model, call)()
        loop.model.close()
        return loop.model.stats().steps, loop.net.weight.detach().clone()

    found = run_ranks(3, rank, timeout=20)
    assert [steps for steps, _ in found] == [4, 4, 4]
    assert torch.equal(found[0][1], found[1][1])


def test_a_scaler_of_two_networks() -> None:
    def rank(communicator: Communicator) -> tuple[int, int]:
        shared = scaler()
        first, second = (Loop(communicator, "decentralized", shared) for _ in range(2))
        for number in range(4):
            for loop in (first, second):
                loop.step(number, overflows=number == 1 and loop is first and communicator.rank == 0)
                shared.update()
        for loop in (first, second):
            loop.model.synchronize()
            loop.model.close()
        return first.model.stats().steps, second.model.stats().steps

    assert run_ranks(2, rank, timeout=20) == [(4, 4), (4, 4)]


def test_a_scaler_that_is_loaded() -> None:
    def rank(communicator: Communicator) -> int:
        loop = Loop(communicator, "decentralized", scaler())
        if communicator.rank == 0:
            loop.scaler.load_state_dict(loop.scaler.state_dict() | {"scale": 2.0})
        for number in range(3):
            loop.step(number)
            loop.scaler.update()
        loop.model.close()
        return loop.model.stats().steps

    assert run_ranks(2, rank, timeout=20) == [3, 3]


def test_copies_of_a_scaler_and_its_end() -> None:
    def rank(communicator: Communicator) -> list[Any]:
        loop = Loop(communicator, "decentralized", scaler())
        copies = [copy.deepcopy(loop.scaler), pickle.loads(pickle.dumps(loop.scaler))]
        for each in copies:
            assert each.step.__func__ is torch.amp.GradScaler.step
            assert each.step.__self__ is each
        loop.model.close()
        return [name for name in vars(loop.scaler) if name == "step"]

    assert run_ranks(2, rank, timeout=20) == [[], []]


def test_another_librarys_step_stays() -> None:
    calls: list[int] = []

    def rank(communicator: Communicator) -> int:
        own = scaler()
        inner = own.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(communicator.rank)
            return inner(*args, **kwargs)

        own.step = counted  # type: ignore[method-assign]
        loop = Loop(communicator, "decentralized", own)
        loop.step(0, overflows=communicator.rank == 0)
        own.update()
        loop.model.close()
        assert own.step is counted
        return loop.model.stats().steps

    assert run_ranks(2, rank, timeout=20) == [1, 1]
    assert sorted(calls) == [0, 1]


def test_scales_that_differ_between_ranks() -> None:
    """An overflow concerns one rank: wrapping accepts its scale, and a switch to gradients gives all ranks the same."""

    def rank(communicator: Communicator) -> tuple[float, torch.Tensor]:
        loop = Loop(
            communicator, "decentralized", torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + communicator.rank))
        )
        for number in range(2):
            loop.step(number)
            loop.scaler.update()
        loop.model = loop.model.switch_to(Choco, optimizer=loop.optimizer, scaler=loop.scaler, eta=0.5)
        loop.step(2)
        loop.scaler.update()
        loop.model = loop.model.switch_to(GradientAllReduce, optimizer=loop.optimizer)
        for number in range(3, 6):
            loop.step(number)
            loop.scaler.update()
        loop.model.close()
        return loop.scaler.get_scale(), loop.net.weight.detach().clone()

    (scale, first), (other, second) = run_ranks(2, rank, timeout=20)
    assert scale == other
    assert torch.equal(first, second)
