"""PyTorch's DistributedDataParallel with its PowerSGD hook, rank 4, with one bucket: with several it ends on Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.track.loop import Loop

TITLE, PACKAGE = "DDP, PowerSGD hook", "torch"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    dist.init_process_group("gloo")
    # The second collective of a bucket begins in a callback, and callbacks of two buckets have no order (PyTorch 2.13).
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    wrapped.register_comm_hook(state, powerSGD_hook)
    loop.run(wrapped, optimizer)
