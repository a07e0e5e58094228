"""Gradients of which somebody keeps references, beyond the next exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import from_spec
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, fill
from tests.grids import grid

SPECS = [
    "allreduce",
    "allreduce:hierarchical=true",
    "bytegrad",
    "sign",
    "sign:majority_vote=true",
    "dgc:ratio=0.1",
    "topk:ratio=0.1",
    "powersgd",
    "onebit_adam:freeze_step=2",
]
KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a view": lambda gradient: gradient.view(-1),
    "its data": lambda gradient: gradient.data,
    "memory": lambda gradient: gradient.numpy(),
}


@grid(cover=1, spec=SPECS, keep=list(KEPT), bucket_bytes=[600, 10 << 20])
def test_kept_gradients_stay_as_they_are(spec: str, keep: str, bucket_bytes: int) -> None:
    """Of every task and step, in buckets of one tensor, too; and the training is that of a loop that keeps nothing."""

    def rank(communicator: Communicator) -> None:
        ends = []
        for keeps in (True, False):
            module = Odd()
            algorithm = from_spec(spec, module, communicator=communicator, bucket_bytes=bucket_bytes)
            optimizer = getattr(algorithm, "optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1)
            kept = []
            for step in range(3):
                for task in range(2):
                    optimizer.zero_grad()
                    algorithm(batch(communicator.rank, 2 * step + task)).square().mean().backward()
                    if keeps:
                        there = [p.grad for p in module.parameters() if p.grad is not None]
                        kept += [(KEPT[keep](gradient), gradient.clone()) for gradient in there]
                        del there
                optimizer.step()
            for gradient, copy in kept:
                assert torch.equal(torch.as_tensor(gradient).reshape(-1), copy.reshape(-1))
            ends.append([p.detach().clone() for p in module.parameters()])
            algorithm.close()
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))

    run_ranks(2, rank)


@grid(cover=1, spec=SPECS, set_to_none=[True, False], own=[True, False])
def test_memory_stays_where_nobody_keeps_gradients(
    spec: str, set_to_none: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither optimizers nor exchanges do."""
    moved, leave = list[bool](), Bucket.leave

    def noted(self: Bucket, gradients: Any) -> bool:
        moved.append(leave(self, gradients))
        return moved[-1]

    monkeypatch.setattr(Bucket, "leave", noted)

    def rank(communicator: Communicator) -> None:
        module = Odd()
        algorithm = from_spec(spec, module, communicator=communicator, bucket_bytes=600)
        kind = optim.SGD if own else torch.optim.SGD
        optimizer = getattr(algorithm, "optimizer", None) or kind(module.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            algorithm(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()

    run_ranks(2, rank)
    assert moved
    assert not any(moved)


@grid(cover=1, spec=["allreduce", "bytegrad", "dgc:ratio=0.1"])
def test_what_is_done_to_a_gradient_is_not_done_to_the_bucket(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        ends = []
        for changes in (True, False):
            module = Odd()
            algorithm = from_spec(spec, module, communicator=communicator)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                for p in module.parameters() if changes else ():
                    if p.grad is not None:
                        assert p.grad.detach_() is p.grad
                        assert not p.grad._is_view()
                        if step == 1:
                            p.grad.data = p.grad.data.clone()
                        if step == 2:
                            p.grad.requires_grad_()
                optimizer.step()
            ends.append([p.detach().clone() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        assert not any(p.grad is not None and p.grad.requires_grad for p in module.parameters())

    run_ranks(2, rank)


def test_kept_gradients_of_a_rank_that_joined() -> None:
    """It takes part with zeros."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 3)
        fill(module)
        algorithm = from_spec("allreduce", module, communicator=communicator)
        kept = []
        with algorithm.join():
            for step in range(2 + communicator.rank):
                module.zero_grad()
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                kept.append((module.weight.grad, module.weight.grad.clone()))
            module.zero_grad()
        assert all(torch.equal(a, b) for a, b in kept)

    run_ranks(2, rank)
