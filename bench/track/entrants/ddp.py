"""PyTorch's DistributedDataParallel, with float32 gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.track.loop import Loop

TITLE, PACKAGE = "DDP", "torch"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    dist.init_process_group("gloo")
    loop.run(DistributedDataParallel(model), optimizer)
