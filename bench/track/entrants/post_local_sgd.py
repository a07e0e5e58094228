"""PyTorch's post-local SGD: gradients are averaged for 20 steps, and then parameters once in 30 steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.track.loop import Loop

TITLE, PACKAGE = "post-local SGD", "torch"
FIRST, PERIOD = 20, 30


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    dist.init_process_group("gloo")
    # A rank's subgroup is itself: without one it would be all ranks of a node, of which there is one here.
    alone, _ = dist.new_subgroups(group_size=1)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(PostLocalSGDState(None, alone, FIRST), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=FIRST)
    loop.run(wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager))
