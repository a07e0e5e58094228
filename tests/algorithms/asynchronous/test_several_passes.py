"""Several forward passes before one backward pass, as adversarial networks have them: nothing is brought in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, Wagma
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts

STEPS = 3


def gradients(net: nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(torch.stack(losses).sum(), list(net.parameters())))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"), [(AsyncModelAverage, {"interval": 100}), (AsyncDecentralized, {}), (Wagma, {"period": 5})]
)
def test_gradients_are_those_of_a_copy(kind: Any, options: dict[str, Any], recomputed: bool) -> None:
    """What is owed while passes are made arrives after the step, though activations may be recomputed in backward."""

    def rank(communicator: Communicator) -> None:
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        # Nothing moves but by what is owed.
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        model = kind(net, optimizer, communicator=communicator, **options)
        generator = torch.Generator().manual_seed(communicator.rank)

        def run(x: torch.Tensor) -> torch.Tensor:
            if recomputed:
                return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()
            return model(x).square().mean()

        for number in range(STEPS):
            real, fake = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
            first = run(real)
            plain = copy.deepcopy(net)
            plain._forward_pre_hooks.clear()
            # Averages with the other rank must not happen to take it back.
            amount = 0.5 + 0.171 * communicator.rank + 0.0137 * number**2
            owed = [torch.full_like(bucket.flat, amount) for bucket in model.local.flat.buckets]
            before = [bucket.flat.clone() for bucket in model.local.flat.buckets]
            parts.averages(model).model.owe(owed)
            second = run(fake)
            expected = gradients(plain, plain(real).square().mean(), plain(fake).square().mean())
            (first + second).backward()
            for parameter, gradient in zip(net.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
            for bucket, values in zip(model.local.flat.buckets, before, strict=True):
                assert torch.equal(bucket.flat, values)
            optimizer.step()
            optimizer.zero_grad()
            model(real)
            for bucket, values in zip(model.local.flat.buckets, before, strict=True):
                assert not torch.equal(bucket.flat, values)
            # The step of the pass that was only looked at.
            optimizer.step()
        model.close()

    run_ranks(2, rank)
