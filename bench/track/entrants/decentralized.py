"""Each rank mixes its parameters with one neighbour's in each step, while it computes gradients."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm
from bench.track.loop import Loop

TITLE, PACKAGE = "Decentralized", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    with algorithms.Decentralized(model, optimizer) as wrapped:
        loop.run(wrapped, optimizer)
