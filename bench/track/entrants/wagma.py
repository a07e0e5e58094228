"""Groups that any member starts average parameters, and all ranks do once in ten steps."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm
from bench.track.loop import Loop

TITLE, PACKAGE = "Wagma", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    with algorithms.Wagma(model, optimizer) as wrapped:
        loop.run(wrapped, optimizer)
