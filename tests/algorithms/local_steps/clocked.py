"""Ranks whose speed is what a test says: a clock for their models, and a module of one vector."""

from __future__ import annotations

from typing import Any

import torch

N = 33


class Clock:
    """Seconds that pass only when the test lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def on_clock(model: Any, clock: Clock) -> None:
    """Lets a model read another clock than the machine's; one rank alone has no pace."""
    pace = None if model.rounds is None else model.setup.weights.pace
    if pace is not None:
        pace._clock, pace._began = clock, clock.now


class Vector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(N))

    def forward(self) -> torch.Tensor:
        return self.x
