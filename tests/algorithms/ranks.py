"""Small models trained by thread ranks, for tests of algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm
from bagua_kernels.comm import Communicator


class Odd(nn.Module):
    """Layers whose sizes are divisible by nothing, one frozen parameter and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(7, 31)
        self.second = nn.Linear(31, 13, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(3))
        fill(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def fill(module: nn.Module, seed: int = 0) -> None:
    """Sets parameters to seeded values, without torch's global generator, which thread ranks share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)


def batch(rank: int, step: int, width: int = 7) -> torch.Tensor:
    """Every rank's inputs differ, and every step's."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(module: nn.Module, rank: int, step: int, n: int = 4) -> torch.Tensor:
    """A mean over n of the rank's samples of a step."""
    return module(batch(rank, step)[:n]).square().mean()


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def train(
    communicator: Communicator,
    wrap: Callable[..., Algorithm] | Algorithm,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    momentum: float = 0.9,
    **arguments: object,
) -> tuple[list[torch.Tensor], Algorithm]:
    """Trains for a few steps from different seeds on each rank; returns the parameters and the algorithm."""
    if isinstance(wrap, Algorithm):
        algorithm = wrap
    else:
        algorithm = wrap(Odd(seed=communicator.rank).to(dtype), communicator=communicator, **arguments)
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1, momentum=momentum)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        algorithm(batch(communicator.rank, step).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in algorithm.parameters()], algorithm


def compiled_beside_plain(communicator: Communicator, case: Any, steps: int) -> list[Any]:
    """Trains a compiled module and a plain one by an algorithm on parameters, and compares them; returns both algorithms."""
    pairs = []
    for compile_it in (False, True):
        module = Odd(seed=0)
        if compile_it:
            module.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        pairs.append((case.make(module, optimizer, communicator), optimizer))
    for step in range(steps):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
    models = [model for model, _ in pairs]
    for model in models:
        model.wait()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    return models
