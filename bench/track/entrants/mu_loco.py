"""Local steps of Muon, of which pseudo-gradients of 4 bits are averaged beside the next ones."""

from __future__ import annotations

import torch

from bagua_kernels import algorithms, comm, optim
from bench.track.loop import Loop

TITLE, PACKAGE = "MuLoCo", "bagua_kernels"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    comm.init()
    rate = optimizer.param_groups[0]["lr"]
    muon = optim.muon_with_adamw(model, lr=8 * rate, weight_decay=0.01, adamw_lr=rate, adamw_weight_decay=0.01)
    with algorithms.MuLoCo(model, muon, delay=10) as wrapped:
        loop.run(wrapped, muon)
