"""Gradients on their way into a bucket: copied, lent, or let go."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import (
    QSGD,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    GradientAllReduce,
    Guard,
    PowerSGD,
)
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.low_rank import LowRankExchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work, run_ranks
from tests.algorithms.ranks import batch, fill, gradients
from tests.grids import grid


class Lending(GradientAllReduce):
    """Notes which gradients are still where backward has left them."""

    name = "lending"

    def place(self, name: str, parameter: nn.Parameter) -> tuple[Hashable, bool]:
        return None, parameter.dim() < 2

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        outer = self

        class Lent(Mean):
            reads_in_place = True

            def run(self, step: int) -> Iterator[Work]:
                outer.lent = list(bucket.lent)
                bucket.collect()
                yield from super().run(step)

        return Lent(bucket, communicator)


def test_gradients_are_lent() -> None:
    """What is to be compressed; not what has no gradient, or a weight."""

    def rank(communicator: Communicator) -> None:
        module, plain = (nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 5)]) for _ in range(2))
        fill(module)
        fill(plain)
        algorithm, other = (
            kind(m, communicator=communicator) for kind, m in ((Lending, module), (GradientAllReduce, plain))
        )
        for step, weight in ((0, None), (1, None), (2, 0.5 + communicator.rank)):
            for each in (algorithm, other):
                each.zero_grad()
                if weight is not None:
                    each.weigh(weight)
                x = batch(communicator.rank, step)
                used = each.module[0](x) + (each.module[1](x) if step == 1 else 0)
                used.square().mean().backward()
            (bucket,) = algorithm._engine.buckets.all
            names = [bucket.names[slot] for slot in algorithm.lent]
            assert sorted(names) == [["0.weight"], ["0.weight", "1.weight"], []][step]
            assert not bucket.lent
            for a, b in zip(gradients(module), gradients(plain), strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)

    run_ranks(2, rank)


class Looking(GradientAllReduce):
    """Notes which parameters' gradients are in the bucket when it is exchanged."""

    name = "looking"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        outer = self

        class Looked(Mean):
            def run(self, step: int) -> Iterator[Work]:
                parameters = dict(outer.module.named_parameters())
                for name, view in zip(bucket.names, bucket.views, strict=True):
                    gradient = parameters[name].grad
                    outer.inside[name] = gradient is not None and gradient.data_ptr() == view.data_ptr()
                yield from super().run(step)

        return Looked(bucket, communicator)


def test_what_was_copied_is_let_go() -> None:
    """Not where a later hook is at work on the gradient, and nothing is there without one."""

    def rank(communicator: Communicator) -> None:
        module = nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 5)])
        algorithm = Looking(module, communicator=communicator)
        algorithm.inside = {}
        module[0].bias.register_post_accumulate_grad_hook(lambda p: None)
        module[0](batch(communicator.rank, 0)).square().mean().backward()
        assert algorithm.inside == {"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}
        assert all((p.grad is None) == name.startswith("1.") for name, p in module.named_parameters())

    run_ranks(2, rank)


@grid(cover=1, kind=[GradientAllReduce, Lending], seconds=[0.0, 0.05])
def test_what_later_hooks_make_of_gradients_is_not_exchanged(seconds: float, kind: type[Algorithm]) -> None:
    """However fast the thread is that exchanges them."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = nn.Linear(7, 3, bias=False)
        fill(module)
        algorithm = kind(module, communicator=communicator)

        def change(parameter: torch.Tensor) -> None:
            time.sleep(seconds)
            parameter.grad.mul_(2)

        if communicator.rank == 1:
            module.weight.register_post_accumulate_grad_hook(change)
        algorithm(batch(communicator.rank, 0)).square().mean().backward()
        return module.weight.grad

    found = run_ranks(2, rank)
    expected = nn.Linear(7, 3, bias=False)
    fill(expected)
    sum(expected(batch(r, 0)).square().mean() / 2 for r in range(2)).backward()
    for gradient in found:
        assert torch.allclose(gradient, expected.weight.grad, atol=1e-6)


class Mixed(nn.Module):
    """Large and small matrices, a transposed one, and a convolution whose parameters may be channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3)
        self.large = nn.Linear(72, 65)
        self.transposed = nn.Parameter(torch.empty(40, 65).t())
        self.small = nn.Linear(40, 3)
        self.unused = nn.Linear(9, 8)
        fill(self)
        self.convolution.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x.view(-1, 4, 5, 5)).flatten(1)
        return self.small(torch.tanh(self.large(x)) @ self.transposed)


def trained(
    communicator: Communicator, kind: type[Algorithm], dtype: torch.dtype, keep: bool, **options: object
) -> list[torch.Tensor]:
    module = Mixed().to(dtype)
    algorithm = kind(module, communicator=communicator, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad(set_to_none=not keep)
        if step == 4:
            algorithm.weigh(1.0 + communicator.rank)
        algorithm(batch(communicator.rank, step, 100).to(dtype)).float().square().mean().backward()
        optimizer.step()
    algorithm.close()
    return [p.detach().clone() for p in module.parameters()]


@grid(
    keep={"dropped": False, "kept": True},
    dtype=[torch.float32, torch.bfloat16],
    kind__options=[
        (DoubleSqueeze, {}),
        (ByteGrad, {}),
        (QSGD, {"warmup_steps": 2}),
        (CompressedAllReduce, {"codec": {0: "minmax_uint8:block=64", 3: "minmax_uint8"}}),
        (CompressedAllReduce, {"codec": "absmax_int8", "guard": Guard(every=2, bound=1.0), "error_feedback": False}),
        (PowerSGD, {"rank": 2, "start_step": 2}),
        (PowerSGD, {"rank": 4, "bucket_bytes": 1 << 12}),
    ],
    cover=1,
)
def test_lent_gradients_train_as_copied_ones(
    monkeypatch: pytest.MonkeyPatch, kind: type[Algorithm], options: dict, dtype: torch.dtype, keep: bool
) -> None:
    """Bit for bit, and some are lent."""
    lent = []
    lend = Bucket.lend

    def noted(bucket: Bucket, slot: int, tensor: torch.Tensor) -> bool:
        done = lend(bucket, slot, tensor)
        lent.append(done)
        return done

    monkeypatch.setattr(Bucket, "lend", noted)
    with monkeypatch.context() as patch:
        for exchange in (CompressedExchange, LowRankExchange):
            patch.setattr(exchange, "reads_in_place", False)
        expected = run_ranks(2, lambda c: trained(c, kind, dtype, keep, **options))
    assert not lent
    found = run_ranks(2, lambda c: trained(c, kind, dtype, keep, **options))
    assert any(lent)
    assert all(p.isfinite().all() for p in expected[0])
    for each in (*found, *expected):
        for a, b in zip(each, expected[0], strict=True):
            assert torch.equal(a, b)


def test_a_subclass_finds_gradients_in_the_bucket() -> None:
    """One that has an exchange of its own."""

    class Half(CompressedExchange):
        def run(self, step: int) -> Iterator[Work]:
            assert not self.bucket.lent
            self.bucket.whole.mul_(0.5)
            yield from super().run(step)

    class Halved(ByteGrad):
        def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
            return Half(bucket, communicator, self.policy, self.feedback)

    class Looked(LowRankExchange):
        def run(self, step: int) -> Iterator[Work]:
            assert not self.bucket.lent
            yield from super().run(step)

    class Own(PowerSGD):
        def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
            return Looked(bucket, communicator, self.policy, self.config)

    for kind in (Halved, Own):
        run_ranks(2, lambda c, kind=kind: trained(c, kind, torch.float32, False))
