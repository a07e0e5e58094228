"""The asynchronous algorithms, and trainings by thread ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, Wagma
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.mailbox.groups import Shuffled
from tests.algorithms.ranks import Odd, batch

Make = Callable[..., Any]

ALL: dict[str, Make] = {
    "wagma": partial(Wagma, period=3),
    "wagma, paper": partial(Wagma, stale_rule="paper", period=4),
    "wagma, never": partial(Wagma, period=None, activate="all"),
    "average": partial(AsyncModelAverage, interval_ms=1),
    "average, codec": partial(AsyncModelAverage, interval_ms=0, codec="minmax_uint8:block=64"),
    "average, steps": partial(AsyncModelAverage, interval=2, warmup_steps=2),
    "pairs": AsyncDecentralized,
    "pairs, codec": partial(AsyncDecentralized, codec="minmax_uint8:block=64"),
}


def shuffled(size: int) -> Make:
    """Wagma with groups of two or three."""
    return partial(Wagma, groups=Shuffled(size, 2, 5), period=5)


def flat(module: nn.Module) -> torch.Tensor:
    """A copy of all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def trained(module: nn.Module) -> torch.Tensor:
    """A copy of all trainable parameters."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def made(
    make: Make, communicator: Communicator, module: nn.Module | None = None, lr: float = 0.1
) -> tuple[Any, Any, Any]:
    """A module, its optimizer, and the algorithm."""
    module = Odd() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
    return module, optimizer, make(module, optimizer, communicator=communicator)


def quiet(model: Any) -> None:
    """Lets no timer start rounds from now on, so that parameters stay as they are between collective calls."""
    if hasattr(model, "pause"):
        model.pause()


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Takes some steps."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
