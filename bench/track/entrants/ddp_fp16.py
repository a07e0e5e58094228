"""PyTorch's DistributedDataParallel with its hook for gradients of 16 bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.track.loop import Loop

TITLE, PACKAGE = "DDP, fp16 hook", "torch"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    loop.run(wrapped, optimizer)
