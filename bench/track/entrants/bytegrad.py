"""Gradients of 8 bits, with a scale for each block."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm
from bench.track.loop import Loop

TITLE, PACKAGE = "ByteGrad", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    with algorithms.ByteGrad(model, optimizer) as wrapped:
        loop.run(wrapped, optimizer)
