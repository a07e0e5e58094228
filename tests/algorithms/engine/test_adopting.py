"""Memory of large gradients that becomes the buckets'."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels import bucket as bucket_module
from bagua_kernels import optim
from bagua_kernels.algorithms import (
    GradientAllReduce,
)
from bagua_kernels.algorithms.engine import buckets as buckets_module
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work, run_ranks
from tests.algorithms.ranks import batch, fill, gradients
from tests.grids import grid


class Copying(GradientAllReduce):
    """Has buckets of the same memory in all steps."""

    name = "copying"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        class Copied(Mean):
            one_collective = True

            def run(self, step: int) -> Iterator[Work]:
                yield from super().run(step)

        return Copied(bucket, communicator)


def layers() -> nn.Module:
    """The second one's gradient has 4 * 64 * 64 bytes."""
    module = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((7, 64), (64, 64), (64, 3))))
    fill(module)
    return module


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gradient that a bucket might adopt, whether it did; busy machines are waited for."""
    monkeypatch.setattr(bucket_module, "_PATIENCE", 10_000)
    found, adopt = [], Bucket.adopt

    def noted(self: Bucket, tensor: torch.Tensor) -> bool:
        found.append(adopt(self, tensor))
        return found[-1]

    monkeypatch.setattr(Bucket, "adopt", noted)
    return found


def test_adopted_memory_and_steps_in_backward(adopted: list[bool]) -> None:
    """Parameters have the bits that they have with copies."""

    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for kind in (GradientAllReduce, Copying):
            module = layers()
            optimizer = optim.Adam(module.parameters(), lr=0.01)
            algorithm = kind(
                module,
                optimizer,
                communicator=communicator,
                bucket_bytes=4 * 64 * 64,
                apply_in_backward=True,
            )
            for step in range(4):
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().clone() for p in module.parameters()])
            algorithm.close()
        return found

    for ours, others in run_ranks(2, rank):
        assert all(torch.equal(*pair) for pair in zip(ours, others, strict=True))
    assert sum(adopted) == 8


@grid(cover=1, bucket_bytes=[4 * 64 * 64, 10 << 20], size=[1, 2, 3])
def test_memory_of_large_gradients_becomes_the_buckets(
    adopted: list[bool], size: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, whether gradients are dropped, kept or weighed, and not where they are there already."""
    monkeypatch.setattr(buckets_module, "_ALONE_BYTES", 4 * 64 * 64)

    def rank(communicator: Communicator) -> None:
        modules = [layers(), layers()]
        algorithms = []
        for module, kind in zip(modules, (GradientAllReduce, Copying), strict=True):
            algorithms.append(kind(module, communicator=communicator, bucket_bytes=bucket_bytes, lanes=1))
        # Who copies gains nothing by buckets of one tensor.
        if size > 1 and bucket_bytes > 4 * 64 * 64:
            assert [len(algorithm._engine.buckets.all) for algorithm in algorithms] == [2, 1]
        first: list[torch.Tensor] = []
        for step, (drop, weight) in enumerate([(True, None), (True, None), (False, None), (True, 0.5), (False, 2.0)]):
            for algorithm in algorithms:
                algorithm.module.zero_grad(set_to_none=drop)
                if weight is not None:
                    algorithm.weigh(weight + communicator.rank)
                algorithm(batch(communicator.rank, step)).square().mean().backward()
            for one, other in zip(*map(gradients, modules), strict=True):
                assert torch.equal(one, other)
            first = first or [modules[0][1].weight.grad, modules[0][1].weight.grad.clone()]
            # Who keeps a gradient that was dropped finds it unchanged.
            assert step != 1 or torch.equal(*first)

    run_ranks(size, rank)
    # The large matrix's, of each step in which gradients were dropped.
    assert sum(adopted) == (0 if size == 1 else 3 * size)


def test_what_is_adopted() -> None:
    """Plain tensors with the bucket's format that have all of their memory, which PyTorch can free, to themselves."""
    bucket = Bucket([torch.empty(5, 4)], align=1)
    inferred = torch.inference_mode()(torch.ones)(5, 4)
    foreign = torch.from_numpy(np.ones((5, 4), np.float32))
    for refused in (
        torch.ones(6, 4)[1:],
        torch.empty(0).set_(torch.ones(24).untyped_storage(), 0, (5, 4), (4, 1)),
        torch.ones(4, 5).t(),
        torch.ones(5, 4, dtype=torch.float64),
        torch.ones(5, 4, requires_grad=True),
        nn.Parameter(torch.ones(5, 4)),
        inferred,
        foreign,
        bucket.views[0],
    ):
        assert not bucket.adopt(refused)
    held = torch.ones(5, 4)
    other = held.view(20)
    assert not bucket.adopt(held)
    del other
    assert bucket.adopt(held)
    assert bucket.views[0].data_ptr() == bucket.whole.data_ptr() == held.data_ptr()
    assert not Bucket([torch.empty(5, 4)], align=1, flags=1).adopt(torch.ones(5, 4))
    assert not Bucket([torch.empty(5, 4)], align=8).adopt(torch.ones(5, 4))
    assert not Bucket([torch.empty(5, 2)] * 2, align=1).adopt(torch.ones(5, 4))
    turned = torch.empty_strided((5, 4), (1, 5))
    bucket = Bucket([torch.empty(4, 5).t()], align=1)
    assert bucket.adopt(turned)
    assert bucket.views[0].stride() == turned.stride()


def test_memory_that_several_gradients_share_is_not_adopted(
    adopted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parameters that are added up in several shapes, backward leaves one tensor's views."""
    monkeypatch.setattr(bucket_module, "_PATIENCE", 50)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(shape)) for shape in ((6,), (2, 3), (3, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.a + self.b.view(6) + self.c.view(6)) * x).sum()

    alone = Shared()
    alone(torch.ones(6)).backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in alone.parameters()}) < 3, "nothing is shared to begin with"

    def rank(communicator: Communicator) -> None:
        module = Shared()
        algorithm = GradientAllReduce(module, communicator=communicator, bucket_bytes=1)
        for step in range(3):
            module.zero_grad()
            algorithm(torch.arange(6.0) * (communicator.rank + step)).backward()
            for parameter in module.parameters():
                assert torch.equal(parameter.grad.flatten(), torch.arange(6.0) * (0.5 + step))

    run_ranks(2, rank)
