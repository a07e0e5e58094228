"""The guard of encoded differences: what it takes for divergence, and what not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Choco
from bagua_kernels.algorithms.gossip.differences import Guard
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import MinMaxUInt2
from bagua_kernels.errors import DivergenceError
from tests.algorithms.ranks import batch, fill

N = 64


def looked(values: list[tuple[float, float, float]], noise: float, size: float = 1.0) -> tuple[int, int]:
    """Shows a guard norms of differences and steps, at learning rates; returns its count, and the look that raised, or -1."""
    guard = Guard("Some", MinMaxUInt2(), "another")
    one = torch.full((N,), N**-0.5)
    for look, (norm, step, rate) in enumerate(values):
        lost = norm * noise**0.5
        try:
            guard.look(norm * one, (norm - lost) * one, size * one, step * one if look else None, rate, 8 * look)
        except DivergenceError:
            return guard.grown, look
    return guard.grown, -1


def test_differences_that_grow_with_the_learning_rate_are_healthy() -> None:
    """A thousandfold, for a codec that keeps most of them for the next round and for one that adds to them."""
    for noise in (0.9, 0.99, 1.5):
        rising = [(0.001 * (1 + look), 0.001 * (1 + look), 1e-4 * (1 + look)) for look in range(1000)]
        assert looked(rising, noise, size=0.0) == (0, -1)


def test_a_sparse_codec_holds_back_many_steps() -> None:
    """As many as its error says, at a constant rate, until they are all that it can hold."""
    assert looked([(min(1.0 + 8 * look, 200.0), 1.0, 0.1) for look in range(60)], noise=0.99**2, size=0.0) == (0, -1)


def test_one_large_step_is_counted_and_no_more() -> None:
    """Differences shrink after it."""
    burst = [(1.0, 1.0, 0.1)] * 10 + [(1000.0 * 0.9**k, 1.0, 0.1) for k in range(20)]
    grown, raised = looked(burst, noise=0.76)
    assert grown > 2
    assert raised == -1


@pytest.mark.parametrize("noise", [0.8, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.1, 1e-4])
def test_growth_without_end_is_divergence(noise: float, rate: float) -> None:
    """Though gradients grow with it, for the parameters are shorter."""
    grown, raised = looked([(0.1 * 4.0**look, 0.2 * 4.0**look, rate) for look in range(20)], noise)
    assert grown == 2
    assert raised < 10


def test_a_quiet_codec_is_never_at_fault() -> None:
    assert looked([(4.0**look, 1.0, 0.1) for look in range(20)], noise=0.5) == (0, -1)


def train(communicator: Communicator, codec: str, warmup: int, steps: int) -> Any:
    module = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3))
    fill(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    model = Choco(module, optimizer, communicator=communicator, codec=codec, eta=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for step in range(steps):
        optimizer.zero_grad()
        (model(batch(communicator.rank, step % 7)) - 1).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.stats().guards


def test_training_goes_on_while_a_learning_rate_rises() -> None:
    for guards in run_ranks(3, train, "topk:ratio=0.05", 200, 210):
        assert guards == {"grown": 0}
