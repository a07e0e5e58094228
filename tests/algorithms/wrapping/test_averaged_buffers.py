"""Which buffers are means over ranks: running statistics, or those that are named. The others are rank 0's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import ByteGrad, Choco, Decentralized, GradientAllReduce, LocalSGD
from bagua_kernels.algorithms.local_steps.quorum import QuorumCatchUp
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts
from tests.algorithms.ranks import batch, fill
from tests.grids import grid


class Kept(nn.Module):
    """Buffers of many kinds, with values of this rank's own after `own`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 3), nn.BatchNorm1d(3)
        self.register_buffer("direction", torch.ones(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache_of_running_mean", torch.zeros(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("temporary_running_mean", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def own(self, rank: int) -> None:
        self.norm.running_mean.copy_(torch.tensor([0.1, rank + 1.0, -0.0]))
        self.norm.running_var.fill_(2.0 * rank)
        self.direction.copy_(nn.functional.one_hot(torch.tensor(rank % 3), 3))
        self.mask.copy_(torch.arange(3) == rank)
        self.count.fill_(10 + rank)
        self.cache_of_running_mean.fill_(rank + 3)
        self.temporary_running_mean.copy_(torch.tensor([0.1, rank], dtype=torch.float64))


def check(module: Kept, ranks: range) -> None:
    mean = sum(ranks) / len(ranks)
    first = ranks[0]
    assert torch.equal(module.norm.running_mean, torch.tensor([0.1, mean + 1, -0.0]))
    assert torch.signbit(module.norm.running_mean[2])
    assert module.norm.running_var.tolist() == [2 * mean] * 3
    assert module.direction.tolist() == nn.functional.one_hot(torch.tensor(first % 3), 3).tolist()
    assert module.mask.tolist() == [rank == first for rank in range(3)]
    assert module.count.item() == 10 + first
    assert module.cache_of_running_mean.tolist() == [mean + 3] * 2
    assert module.temporary_running_mean.tolist() == [0.1, mean]


@grid(kind=[Decentralized, LocalSGD, Choco], size=[3, 7])
def test_algorithms_on_parameters(kind: Any, size: int) -> None:
    """`averaged` puts each rank's own back, bit for bit; `synchronize` leaves the same on all ranks."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        model = kind(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator)
        module.own(communicator.rank)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with model.averaged():
            check(module, range(size))
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, before[name]), name
        model.synchronize()
        check(module, range(size))

    run_ranks(size, rank)


@grid(kind=[ByteGrad, GradientAllReduce], size=[3, 7])
def test_gradient_algorithms(kind: Any, size: int) -> None:
    """Before a forward pass in training."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        model = kind(module, communicator=communicator, average_buffers=True)
        module.own(communicator.rank)
        module.norm.eval()
        model(batch(0, 0))
        check(module, range(size))

    run_ranks(size, rank)


@pytest.mark.parametrize("patterns", ["direction", ["direct*", "c*t"], ("*",)])
def test_patterns(patterns: Any) -> None:
    """Integers are rank 0's even where a pattern matches."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        model = GradientAllReduce(module, communicator=communicator, average_buffers=patterns)
        module.own(communicator.rank)
        module.norm.eval()
        model(batch(0, 0))
        assert module.direction.tolist() == [0.5, 0.5, 0.0]
        assert module.count.item() == 10
        assert module.mask.tolist() == [True, False, False]
        assert module.norm.running_var.tolist() == [1.0 if patterns == ("*",) else 0.0] * 3

    run_ranks(2, rank)


@pytest.mark.parametrize("wrong", [3, [1], b"x", {"a"}])
def test_what_is_no_pattern_is_refused(wrong: Any) -> None:
    """The message has an example."""
    with pytest.raises(TypeError, match=r"running_mean"):
        GradientAllReduce.recipe(average_buffers=wrong)


def test_two_names_of_one_buffer() -> None:
    """It is averaged if one of them matches."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        module.register_buffer("running_mean", module.direction)
        model = GradientAllReduce(module, communicator=communicator, average_buffers=True)
        module.own(communicator.rank)
        model(batch(0, 0))
        assert module.direction.tolist() == module.running_mean.tolist() == [0.5, 0.5, 0.0]

    run_ranks(2, rank)


def test_what_is_not_finite_stays_so() -> None:
    """Where all ranks have it, and where one has."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        model = LocalSGD(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator)
        module.norm.running_var.copy_(torch.tensor([torch.inf, communicator.rank, torch.nan]))
        module.norm.running_mean.copy_(torch.tensor([1.0, -1.0, 1.0]) / (1 - torch.tensor([0, 1, communicator.rank])))
        model.synchronize()
        assert str(module.norm.running_var.tolist()) == "[inf, 0.5, nan]"
        assert module.norm.running_mean.tolist() == [1.0, -torch.inf, torch.inf]

    run_ranks(2, rank)


def test_a_state_on_another_number_of_ranks() -> None:
    """It begins with the means of running statistics, and the first state's other buffers."""

    def save(communicator: Communicator) -> Any:
        module = Kept()
        model = Decentralized(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator)
        module.own(communicator.rank)
        return model.algorithm_state_dict()

    states = run_ranks(3, save)

    def load(communicator: Communicator) -> None:
        module = Kept()
        model = Decentralized(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator)
        model.load_algorithm_state_dict(states)
        check(module, range(3))

    run_ranks(2, load)
    run_ranks(1, load)


def test_those_that_are_left_of_a_quorum() -> None:
    """The first of them gives its bytes."""

    def rank(communicator: Communicator) -> None:
        module = Kept()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = LocalSGD(module, optimizer, communicator=communicator, interval=2, quorum=2, grace=0.0)
        values = torch.tensor([0, 1, 127, 128, 255, communicator.rank], dtype=torch.uint8)
        if communicator.rank:
            rounds = parts.outer_rounds(model)
            assert isinstance(rounds.catch_up, QuorumCatchUp)
            rounds.catch_up._left = [1, 2]
            rounds.give_first(values)
            assert values.tolist() == [0, 1, 127, 128, 255, 1]
        communicator.all_gather_object(None)

    run_ranks(3, rank)
