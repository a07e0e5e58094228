"""Models in `DistributedDataParallel` with a hook, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels.algorithms import ddp
from tests.algorithms.ranks import batch, fill, gradients, loss_of

SMALL = 1e-3  # MB: several buckets


class Deep(nn.Module):
    """Several matrices, some of them much larger than others, a bias, and a matrix that only some passes use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))
        self.wide = nn.Linear(7, 130, bias=False)
        self.seldom = nn.Linear(7, 7)
        fill(self, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            # Gradients of different layers differ by powers of ten.
            x = x + 10.0**-index * torch.tanh(layer(x))
        if seldom:
            x = self.seldom(x)
        return self.wide(x)


OPEN: list[ddp.Hook] = []


def close_hooks() -> None:
    """Frees the connections of all hooks that `hooked` has made; collective."""
    while OPEN:
        OPEN.pop().close()


def hooked(spec: str, model: nn.Module | None = None, names: bool = True, **arguments: Any) -> Any:
    """A model in DDP with a hook, and the hook."""
    outer = DistributedDataParallel(Deep() if model is None else model, **{"bucket_cap_mb": SMALL, **arguments})
    made = ddp.hook(spec, outer if names else None)
    outer.register_comm_hook(None, made)
    OPEN.append(made)
    return outer, made


def backward(model: nn.Module, step: int, rank: int | None = None) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(batch(dist.get_rank() if rank is None else rank, step)).square().mean().backward()
    return gradients(model)


def same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def close(found: list[Any], expected: list[Any], **tolerances: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerances or {"rtol": 1e-5, "atol": 1e-7}))


def mean(step: int) -> list[Any]:
    """Of all ranks' gradients, computed here."""
    each = [backward(Deep(), step, rank) for rank in range(dist.get_world_size())]
    return [None if several[0] is None else torch.stack(several).mean(0) for several in zip(*each, strict=True)]


def backward_of(model: nn.Module, step: int) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()
    return gradients(model)
