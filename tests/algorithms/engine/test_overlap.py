"""Exchanges that take place during backward, and beside one another."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, Exchange, GradientAlgorithm, GradientAllReduce
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work, run_ranks
from tests import limits
from tests.algorithms.ranks import batch, fill, gradients


class Logged(GradientAlgorithm):
    """Notes when an exchange starts, and takes its time for it."""

    name = "logged"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        outer = self

        class Slow(Exchange):
            def run(self, step: int) -> Iterator[Work]:
                yield from ()
                outer.log.append(("exchange", bucket.index))
                time.sleep(0.02)

        return Slow(bucket, communicator)


class Noted(torch.autograd.Function):
    """Notes when a gradient passes, and holds it up for long enough that the other thread gets its turn."""

    @staticmethod
    def forward(ctx, x, log, number):
        ctx.note = (log, number)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        log, number = ctx.note
        time.sleep(0.05)
        log.append(("backward", number))
        return grad, None, None


def test_exchanges_start_in_order_and_during_backward() -> None:
    def rank(communicator: Communicator) -> list[tuple[str, int]]:
        layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
        algorithm = Logged(nn.Sequential(*layers), communicator=communicator, bucket_bytes=1)
        algorithm.log = []
        x = batch(0, 0, 8)
        for number, layer in enumerate(layers):
            x = Noted.apply(layer(x), algorithm.log, number)
        x.sum().backward()
        return algorithm.log

    log = run_ranks(2, rank)[0]
    assert [number for kind, number in log if kind == "exchange"] == [0, 1, 2, 3]
    assert log.index(("exchange", 0)) < log.index(("backward", 1))


def test_two_buckets_are_exchanged_at_a_time() -> None:
    """Each waits in its exchange until the other is in its own."""

    class Paired(GradientAllReduce):
        name = "paired"

        def __init__(self, *arguments: object, both: threading.Barrier, **options: object) -> None:
            self.both = both
            super().__init__(*arguments, **options)

        def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
            both = self.both

            class Together(Mean):
                def run(self, step: int) -> Iterator[Work]:
                    both.wait(limits.seconds(20))
                    yield from super().run(step)

            return Together(bucket, communicator)

    def rank(communicator: Communicator) -> list[torch.Tensor | None]:
        module = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False))
        fill(module)
        options = {"communicator": communicator, "bucket_bytes": 1}
        # Held by a name: what is deleted while backward goes on exchanges nothing more.
        paired = Paired(module, both=threading.Barrier(2), **options)
        paired(batch(communicator.rank, 0)).square().mean().backward()
        found = gradients(module)
        paired.close()
        one = GradientAllReduce(nn.Sequential(*module), in_flight=1, **options)
        one.zero_grad()
        one(batch(communicator.rank, 0)).square().mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(one), strict=True))
        return found

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Ahead(GradientAllReduce):
    """Waits for no bucket but the last before the one after it has begun, and counts those under way.

    Args:
        fails: the bucket whose end is an error.
    """

    name = "ahead"

    def __init__(self, *arguments: Any, fails: int | None = None, **options: Any) -> None:
        self.fails, self.lock = fails, threading.Lock()
        self.order: list[int] = []
        self.under_way = self.most = 0
        super().__init__(*arguments, **options)
        self.begun = [threading.Event() for _ in self._engine.buckets.all]

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        return AheadMean(bucket, communicator, self)


class AheadMean(Mean):
    one_collective = True

    def __init__(self, bucket: Bucket, communicator: Communicator, ahead: Ahead) -> None:
        super().__init__(bucket, communicator)
        self.ahead = ahead

    def run(self, step: int) -> Iterator[Work]:
        ahead, index = self.ahead, self.bucket.index
        (work,) = super().run(step)
        with ahead.lock:
            ahead.under_way += 1
            ahead.most = max(ahead.most, ahead.under_way)
            ahead.order.append(index)
            ahead.begun[index].set()
        yield work
        if not all(begun.wait(limits.seconds(20)) for begun in ahead.begun[: index + 2]):
            raise TimeoutError(f"bucket {index + 1} waits for bucket {index}")
        with ahead.lock:
            ahead.under_way -= 1
        if index == ahead.fails:
            raise ArithmeticError("boom")


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_all_reduces_are_under_way_on_one_connection(in_backward: bool) -> None:
    """And no more; they start in order."""

    def train(kind: Callable[..., Algorithm], communicator: Communicator) -> tuple[Any, list[torch.Tensor]]:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
        fill(module)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        options = {"communicator": communicator, "bucket_bytes": 1, "apply_in_backward": in_backward}
        algorithm = kind(module, optimizer, **options)
        algorithm(batch(communicator.rank, 0, 8)).square().mean().backward()
        optimizer.step()
        return algorithm, [p.detach().clone() for p in module.parameters()]

    def rank(communicator: Communicator) -> None:
        ahead, found = train(Ahead, communicator)
        assert ahead.order == [0, 1, 2, 3, 4]
        assert ahead.most == 2
        assert len(ahead._engine.communicators) == len(ahead._communicators()) == 1
        _, expected = train(functools.partial(GradientAllReduce, in_flight=1), communicator)
        assert all(map(torch.equal, found, expected))

    run_ranks(3, rank)


def test_an_error_while_the_next_is_under_way() -> None:
    """Leaves backward, when that one has ended too."""

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        ahead = Ahead(module, communicator=communicator, bucket_bytes=1, fails=0)
        x = batch(communicator.rank, 0, 8)
        with pytest.raises(ArithmeticError, match="boom"):
            ahead(x).sum().backward()
        assert ahead.order == [0, 1]
        with pytest.raises(RuntimeError, match="was interrupted while gradients were exchanged"):
            ahead(x).sum().backward()

    run_ranks(2, rank)
