"""What is predicted and found to be the fastest on this network, of all algorithms."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm
from bench.track.loop import Loop

TITLE, PACKAGE = "AutoTune, any", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    wrapped: algorithms.Algorithm = algorithms.AutoTune(model, optimizer, exactness="any")
    for x, y in loop.batches(optimizer):
        optimizer.zero_grad()
        loop.loss(wrapped, x, y).backward()
        optimizer.step()
        wrapped = wrapped.settled()
    loop.share(f"note.{loop.rank}", f"trained by {wrapped.name} at the end")
    wrapped.close()
