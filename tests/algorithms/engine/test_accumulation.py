"""Gradients to which backward adds without `no_sync()` and without `zero_grad()`: only what is added is exchanged."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DGC, SignSGD, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.grids import grid

SPECS = [
    "dgc:ratio=0.1",
    "dgc:ratio=0.1,nesterov=true,masking=true",
    "sign:majority_vote=true",
    "sign",
    "topk:ratio=0.1",
    "bytegrad",
    "terngrad",
    "powersgd",
    "onebit_adam:freeze_step=1",
]
SHAPES = [(40, 40), (33, 40), (7,), (600, 3)]
EVERY = (True,) * len(SHAPES)


class Given(nn.Module):
    """Its gradients are the arguments; a parameter that is not used has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor], used: tuple[bool, ...] = EVERY) -> torch.Tensor:
        together = zip(self.weights, gradients, used, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient, there in together if there]).sum()


def drawn(step: int, micro: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def wrapped(communicator: Communicator, spec: str) -> tuple[Given, Any]:
    module = Given()
    return module, from_spec(spec, module, communicator=communicator, bucket_bytes=4000)


def used(step: int, micro: int, rank: int) -> tuple[bool, ...]:
    """Not by every rank, and one parameter in some passes by none."""
    return (True, (micro + rank) % 3 != 1, (step + micro) % 2 == 0, micro != 2 or rank == 1)


def by_hand(communicator: Communicator, spec: str, steps: int, local: int | None) -> list[list[torch.Tensor]]:
    """The sums of what each pass gives by itself; a local one goes with the next."""
    module, algorithm = wrapped(communicator, spec)
    found = []
    for step in range(steps):
        sums = [torch.zeros(shape) for shape in SHAPES]
        module.zero_grad()
        for micro in range(4):
            with algorithm.no_sync() if micro == local else contextlib.nullcontext():
                algorithm(drawn(step, micro, communicator.rank), used(step, micro, communicator.rank)).backward()
            if micro != local:
                sums = [one if p.grad is None else one + p.grad for one, p in zip(sums, module.weights, strict=True)]
                module.zero_grad()
        found.append(sums)
    return found


@grid(
    cover=1,
    spec=SPECS,
    zero=["none", "zero", "old zero"],
    local=[None, 0, 1],
    between=["nothing", "detach", "autograd.grad", "in place"],
    # A gradient of zeros is a vote, none is not.
    where=lambda spec, zero, **_: zero == "none" or "vote" not in spec,
)
def test_each_pass_is_exchanged_by_itself(spec: str, zero: str, local: int | None, between: str) -> None:
    """The sum of what the passes give by themselves, and of local ones together with the next."""

    def rank(communicator: Communicator) -> None:
        expected = by_hand(communicator, spec, 3, local)
        module, algorithm = wrapped(communicator, spec)
        for step in range(3):
            for p in module.weights:
                if zero == "none" or p.grad is None:
                    p.grad = None
                else:
                    (p.grad.data if zero == "old zero" else p.grad).zero_()
            for micro in range(4):
                given = drawn(step, micro, communicator.rank)
                with algorithm.no_sync() if micro == local else contextlib.nullcontext():
                    algorithm(given, used(step, micro, communicator.rank)).backward()
                if between == "autograd.grad":
                    torch.autograd.grad(module(given), list(module.weights))
                for p in module.weights if micro != local else ():
                    if p.grad is not None and between == "detach":
                        p.grad = p.grad.detach()
                    elif p.grad is not None and between == "in place":
                        p.grad.mul_(2.0).mul_(0.5)
            for p, sums in zip(module.weights, expected[step], strict=True):
                torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, sums)

    run_ranks(2, rank)


@grid(cover=1, spec=["dgc:ratio=0.1", "sign:majority_vote=true", "bytegrad"])
def test_results_are_scaled_and_clipped_in_between(spec: str) -> None:
    """Also those to which local passes will be added."""

    def rank(communicator: Communicator) -> None:
        gradients = []
        for alone in (True, False):
            module, algorithm = wrapped(communicator, spec)
            algorithm(drawn(0, 0, communicator.rank)).backward()
            scaled = [p.grad.clone() * 0.25 for p in module.weights]
            if alone:
                module.zero_grad()
            else:
                for p in module.weights:
                    p.grad.mul_(0.25)
            for micro in (1, 2):
                with algorithm.no_sync() if micro == 1 else contextlib.nullcontext():
                    algorithm(drawn(0, micro, communicator.rank)).backward()
            gradients.append([p.grad + one if alone else p.grad for p, one in zip(module.weights, scaled, strict=True)])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)

    run_ranks(2, rank)


def test_small_increments_are_not_rounded_away() -> None:
    """Votes are on gradients of any size beside results of 1."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(40, 40, bias=False)
        algorithm = SignSGD(module, majority_vote=True, communicator=communicator)
        for micro, sign in enumerate((1.0, -1.0)):
            (algorithm(torch.ones(1, 40)) * 1e-12 * sign).sum().backward()
            assert torch.equal(module.weight.grad, torch.full((40, 40), 1.0 - micro))

    run_ranks(2, rank)


@grid(cover=1, spec=["dgc:ratio=0.1", "bytegrad"], local=[False, True])
def test_increments_that_nobody_knows(spec: str, local: bool) -> None:
    """What somebody has put in place of a result, or written to when local passes had added to it."""

    def rank(communicator: Communicator) -> None:
        module, algorithm = wrapped(communicator, spec)
        algorithm(drawn(0, 0, communicator.rank)).backward()
        if local:
            with algorithm.no_sync():
                algorithm(drawn(0, 1, communicator.rank)).backward()
        for p in module.weights:
            p.grad = p.grad * 0.5
        if spec == "bytegrad":
            algorithm(drawn(0, 2, communicator.rank)).backward()
        else:
            with pytest.raises(RuntimeError, match=r"weights.\d' .*DGC had exchanged.*zero_grad.*no_sync"):
                algorithm(drawn(0, 2, communicator.rank)).backward()
        # The way out.
        module.zero_grad()
        algorithm(drawn(0, 3, communicator.rank)).backward()

    run_ranks(2, rank)


def test_a_pass_that_breaks_off_leaves_results() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(7, 30), nn.Linear(30, 3))
        algorithm = DGC(module, communicator=communicator, ratio=0.1)
        x = torch.ones(2, 7)
        algorithm(x).square().mean().backward()
        before = [p.grad.clone() for p in module.parameters()]
        broken = module[1](Breaks.apply(module[0](x))).square().mean()
        with pytest.raises(MemoryError):
            broken.backward()
        assert all(p.grad is not None for p in module.parameters())
        for p, one in zip(module[0].parameters(), before, strict=False):
            assert torch.equal(p.grad, one)
        module.zero_grad()
        algorithm(x).square().mean().backward()

    run_ranks(2, rank)


def test_what_was_there_before_wrapping_is_exchanged() -> None:
    """It is no result of an exchange, and ranks may have different ones."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Given()
        for p in module.weights:
            p.grad = torch.full_like(p, 1.0 + communicator.rank)
        algorithm = from_spec("bytegrad", module, communicator=communicator)
        algorithm([torch.zeros(shape) for shape in SHAPES]).backward()
        return module.weights[0].grad.clone()

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.full(SHAPES[0], 1.5))
