"""decent-dp: each rank mixes its parameters with one neighbour's in each step, while it computes gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bench.track.loop import Loop

TITLE, PACKAGE = "decent-dp", "decent-dp"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    from decent_dp.ddp import DecentralizedDataParallel

    dist.init_process_group("gloo")
    made: list[torch.optim.Optimizer] = []

    def optimizer_for(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {name: optimizer.defaults[name] for name in ("lr", "betas", "weight_decay")}
        made.append(torch.optim.AdamW([p for _, p in named], **options))
        return made[-1]

    wrapped = DecentralizedDataParallel(model, optimizer_for, topology="one-peer-exp", _local_world_size=1)
    for x, y in loop.batches(optimizer):
        # It has an optimizer for each bucket, which steps while backward goes on.
        for each in made:
            for group in each.param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]
        loop.loss(wrapped, x, y).backward()
