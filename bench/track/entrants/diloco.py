"""Local steps, of which pseudo-gradients of 4 bits are averaged beside the next ones."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm
from bench.track.loop import Loop

TITLE, PACKAGE = "DiLoCo", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    with algorithms.DiLoCo(model, optimizer, codec="absmax_int4", delay=10) as wrapped:
        loop.run(wrapped, optimizer)
