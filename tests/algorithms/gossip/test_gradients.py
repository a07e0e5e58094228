"""Gradients are those at the parameters that forward has read, while messages are on their way and arrive.

Autograd does not notice a write through a bucket, so that each step is compared with a copy of the module.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import ALL, CASES, Case, flat
from tests.algorithms.ranks import batch, fill
from tests.grids import grid

EVERY = {**ALL, "push_unequal": CASES["push_unequal"]}
LATE = 0.004  # seconds: longer than a round among threads takes


class Slow(nn.Module):
    """Layers between which time passes, in forward and in backward; each layer's backward reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 31), nn.Linear(31, 13), nn.Linear(13, 3)])
        fill(self)
        self.copy: list[Slow] = []

    def forward(self, x: torch.Tensor, pause: bool = True) -> torch.Tensor:
        if pause:
            # The parameters are those of this pass from here on, until backward has ended.
            self.copy = [Slow()]
            for theirs, own in zip(self.copy[0].parameters(), self.parameters(), strict=True):
                theirs.data.copy_(own.data)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if pause:
                time.sleep(LATE)
                x.register_hook(lambda gradient: time.sleep(LATE))
        return x


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters()]


def check_step(model: Any, module: Slow, x: torch.Tensor) -> None:
    """Takes a forward and a backward pass, and repeats them with the copy."""
    module.zero_grad()
    model(x).square().mean().backward()
    (like,) = module.copy
    module.copy = []
    assert torch.equal(flat(module), flat(like)), "parameters were written between forward and the end of backward"
    like.zero_grad()
    like(x, pause=False).square().mean().backward()
    assert all(map(torch.equal, gradients(module), gradients(like)))


@grid(case=EVERY, size=[2, 3, 4], bucket_bytes=[1, 10 << 20], cover=1)
def test_gradients_are_those_of_a_copy(case: Case, size: int, bucket_bytes: int) -> None:
    """All ranks are about as fast, so that everything arrives during forward and backward."""

    def rank(communicator: Communicator) -> None:
        module = Slow()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = case.make(module, optimizer, communicator, bucket_bytes=bucket_bytes)
        start = flat(module)
        for step in range(6):
            check_step(model, module, batch(communicator.rank, step))
            optimizer.step()
        assert model.stats().bytes_sent > 0
        model.wait()
        assert not torch.equal(start, flat(module))
        model.close()

    run_ranks(size, rank)


@grid(case=EVERY, seed=[0, 1], cover=1)
def test_gradients_while_ranks_are_late_in_turn(case: Case, seed: int) -> None:
    """Ranks sleep at random places, so that messages come at all times of a neighbour's step."""

    def rank(communicator: Communicator) -> None:
        module = Slow()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator)
        pauses = random.Random(10 * seed + communicator.rank)
        for step in range(8):
            time.sleep(pauses.choice([0, 0, 0.01, 0.03]))
            check_step(model, module, batch(communicator.rank, step))
            time.sleep(pauses.choice([0, 0.01]))
            optimizer.step()
        model.close()

    run_ranks(3, rank)


@grid(cover=1, case=EVERY)
def test_accumulated_gradients_are_taken_at_one_point(case: Case) -> None:
    """Several passes before a step read the same parameters, however long they take."""

    def rank(communicator: Communicator) -> None:
        module = Slow()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator)
        for step in range(4):
            module.zero_grad()
            read = []
            for micro in range(3):
                model(batch(communicator.rank, 3 * step + micro)).square().mean().backward()
                read.append(flat(module.copy[0]))
            (like,) = module.copy
            module.copy = []
            like.zero_grad()
            for micro in range(3):
                like(batch(communicator.rank, 3 * step + micro), pause=False).square().mean().backward()
            assert torch.equal(read[0], read[1])
            assert torch.equal(read[0], read[2])
            assert all(map(torch.equal, gradients(module), gradients(like)))
            optimizer.step()
        model.close()

    run_ranks(3, rank)


@grid(cover=1, case=EVERY)
def test_evaluation_between_steps_reads_finished_parameters(case: Case) -> None:
    """A pass in evaluation changes nothing of what the next step computes, and repeats."""

    def rank(communicator: Communicator, evaluate: bool) -> list[torch.Tensor]:
        module = Slow()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator)
        x = batch(communicator.rank, 99)
        for step in range(4):
            check_step(model, module, batch(communicator.rank, step))
            optimizer.step()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    before = model(x, pause=False)
                    time.sleep(LATE)
                    assert torch.equal(before, model(x, pause=False))
                model.train()
        model.wait()
        model.close()
        return [flat(module)]

    plain, evaluated = (run_ranks(3, rank, evaluate) for evaluate in (False, True))
    for a, b in zip(plain, evaluated, strict=True):
        assert torch.equal(a[0], b[0])


def test_the_check_would_notice_a_write() -> None:
    """A write through a view between forward and backward, which autograd does not see, is what the other tests look for."""
    module = Slow()
    whole = flat(module)
    for p, part in zip(module.parameters(), whole.split([p.numel() for p in module.parameters()]), strict=True):
        p.data = part.view(p.shape)

    def model(x: torch.Tensor) -> torch.Tensor:
        out = module(x)
        whole.mul_(1.5)
        return out

    check_step(module, module, batch(0, 0))
    with pytest.raises(AssertionError, match="parameters were written"):
        check_step(model, module, batch(0, 0))
