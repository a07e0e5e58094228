"""What an exchange promises of its `run`, and what follows from layouts that change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import QSGD, CompressedAllReduce, Exchange, GradientAlgorithm, GradientAllReduce
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp, Work, run_ranks
from tests.algorithms.ranks import batch, fill


class Late(nn.Module):
    """Layers that are used in another order than that of registration, one of them only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(40, 8), nn.Linear(7, 40)
        self.third, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        fill(self)

    def forward(self, x: torch.Tensor, third: bool = True) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.third(x)) if third else x)


def train(model: GradientAlgorithm, rank: int, first: int, last: int, third_from: int) -> None:
    for step in range(first, last):
        model.zero_grad()
        model(batch(rank, step), step >= third_from).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


class Halving:
    """A mixin: the gradients have to be in the bucket."""

    def run(self: Any, step: int) -> Iterator[Work]:
        self.bucket.flat.mul_(0.5)
        yield from super().run(step)  # type: ignore[misc]


class Mixed(Halving, CompressedExchange):
    """Half of the mean."""


class MixedMean(CompressedAllReduce):
    """Makes the exchanges above."""

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        return Mixed(bucket, communicator, self.policy, self.feedback)


def test_a_run_before_the_attributes_class_resets_them() -> None:
    assert CompressedExchange.reads_in_place
    assert CompressedExchange.delivers
    assert not Mixed.reads_in_place
    assert not Mixed.delivers

    class Remembering(Mean):
        def run(self, step: int) -> Iterator[Work]:
            yield from super().run(step)

    assert not Mean.has_memory
    assert Remembering.has_memory


def test_a_run_of_a_mixin_has_the_gradients_in_the_bucket() -> None:
    def rank(communicator: Communicator) -> float:
        module = nn.Linear(64, 64)
        model = MixedMean(module, communicator=communicator)
        model(torch.full((4, 64), 1.0 + communicator.rank)).sum().backward()
        return float(module.weight.grad.mean())

    assert run_ranks(2, rank) == [3.0, 3.0]


class TwoMeans(Exchange):
    """The mean, and one of other numbers of another length: collectives of two buckets would not fit one another."""

    def run(self, step: int) -> Iterator[Work]:
        yield self.communicator.all_reduce(self.bucket.whole, ReduceOp.AVG)
        other = torch.full((100 + self.bucket.index,), float(self.bucket.index))
        yield self.communicator.all_reduce(other, ReduceOp.AVG)
        assert (other == self.bucket.index).all()


class OneMean(Exchange):
    """The mean, in the bucket's own memory."""

    one_collective = True

    def run(self, step: int) -> Iterator[Work]:
        yield self.communicator.all_reduce(self.bucket.whole, ReduceOp.AVG)


class BySize(GradientAlgorithm):
    """Small buckets in one collective, large ones in two."""

    name = "by_size"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        return (OneMean if bucket.whole.numel() < 1000 else TwoMeans)(bucket, communicator)


class InTurns(nn.Module):
    """Small and large parameters, used in turns, so that the second layout has larger buckets than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList(torch.ones(490) for _ in range(2))
        self.large = nn.ParameterList(torch.ones(600) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for large, small in zip(self.large, self.small, strict=True):
            x = x * large.mean() * small.mean()
        return x


def test_exchanges_of_several_collectives_share_a_connection_after_a_new_layout() -> None:
    def rank(communicator: Communicator) -> list[set[type[Exchange]]]:
        model = BySize(InTurns(), communicator=communicator, bucket_bytes=2000)
        kinds = []
        for _ in range(4):
            model.zero_grad()
            model(torch.full((1,), 1.0 + communicator.rank)).sum().backward()
            kinds.append({type(exchange) for exchange in model._engine.buckets.exchanges})
            assert len(model._engine.communicators) == 1
            for p in model.parameters():
                torch.testing.assert_close(p.grad.sum(), torch.tensor(1.5))
        return kinds

    for kinds in run_ranks(2, rank):
        assert TwoMeans in kinds[-1]


@pytest.mark.parametrize(("saved", "third_from"), [(0, 0), (2, 3), (5, 0)])
def test_a_state_from_before_the_new_layout_resumes_bit_for_bit(saved: int, third_from: int) -> None:
    def rank(communicator: Communicator) -> None:
        whole = QSGD(Late(), communicator=communicator, bucket_bytes=6000)
        train(whole, communicator.rank, 0, saved, third_from)
        resumed = QSGD(Late(), communicator=communicator, bucket_bytes=6000)
        resumed.module.load_state_dict(whole.module.state_dict())
        resumed.load_algorithm_state_dict(whole.algorithm_state_dict())
        for model in (whole, resumed):
            train(model, communicator.rank, saved, 8, third_from)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert whole.algorithm_state_dict()["order"] == resumed.algorithm_state_dict()["order"] != []

    run_ranks(2, rank)


def test_buckets_of_all_sizes_share_the_connections_of_nodes() -> None:
    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Late(), communicator=communicator, nodes=[[0, 1], [2]], bucket_bytes=6000)
        opened = []
        for step in range(3):
            model(batch(communicator.rank, step)).square().mean().backward()
            opened.append([list(each._tiers) for each in model._communicators()])
        assert len({bucket.whole.numel() for bucket in model._engine.buckets.all}) > 1
        assert opened[0] == opened[1] == opened[2]
        model.close()

    run_ranks(3, rank)


def test_options_in_backward_are_those_of_its_begin() -> None:
    """A learning rate that a hook sets while backward runs holds from the next pass on, for all parameters alike."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
        fill(module)
        before = [p.detach().clone() for p in module.parameters()]
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        model = GradientAllReduce(module, optimizer, communicator=communicator, bucket_bytes=1, apply_in_backward=True)
        module[2].weight.register_hook(lambda _: optimizer.param_groups[0].update(lr=0.0))
        model(torch.ones(2, 16)).sum().backward()
        moved = [p.detach().clone() for p in module.parameters()]
        assert all(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
        model(torch.ones(2, 16)).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(moved, module.parameters(), strict=True))
        return moved

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("codec", ["sign", "topk:ratio=0.1"])
def test_a_lost_pass_leaves_no_trace(codec: str) -> None:
    """Residuals go back to what they were before it, also where it began with another loss scale."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(64, 64, bias=False)
        fill(module)
        model = CompressedAllReduce(module, codec=codec, communicator=communicator, min_numel=0, exact="none")

        spare: list[torch.Tensor] = []
        for number in range(3):
            model.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + communicator.rank))
            model(x).square().mean().backward()
        (exchange,) = model._engine.buckets.exchanges  # type: ignore[union-attr]
        expected, back = exchange.own_state(), exchange.mark(spare)
        assert any(each.any() for named in expected.values() for each in named.values())
        places = [each.data_ptr() for each in spare]
        exchange.scale_to(4.0)
        model.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        found = back()
        assert found.keys() == expected.keys()
        for key, named in expected.items():
            assert all(torch.equal(found[key][name], each) for name, each in named.items())
        exchange.mark(spare)
        assert places == [each.data_ptr() for each in spare]
        model.close()

    run_ranks(2, rank)
