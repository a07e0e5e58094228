"""The algorithms with local steps, and a loop that trains with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, DiLoCo, LocalSGD, MuLoCo, PostLocalSGD, SlowMo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from bagua_kernels.optim import ChainedOptimizer
from tests.algorithms.gossip.common import BUCKET_BYTES, SHAPES, Quadratic, Task, falling, flat
from tests.algorithms.ranks import fill


@dataclass(frozen=True)
class Case:
    """An algorithm with what users would write."""

    kind: Callable[..., Algorithm]
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] = lambda module, lr: torch.optim.SGD(
        module.parameters(), lr=lr
    )

    def make(self, module: nn.Module, optimizer: Any, communicator: Communicator, **options: Any) -> Any:
        given = {"bucket_bytes": BUCKET_BYTES, "interval": 4, **self.options, **options}
        return self.kind(module, optimizer, communicator=communicator, **given)


def muon(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Muon for all matrices, SGD for the rest; of a module without any, Muon has a matrix that is not trained."""
    none = [nn.Parameter(torch.zeros(2, 2), requires_grad=False)]
    matrices = [p for p in module.parameters() if p.dim() == 2 and p.requires_grad]
    others = [p for p in module.parameters() if p.dim() != 2 and p.requires_grad]
    return ChainedOptimizer(torch.optim.Muon(matrices or none, lr=lr), torch.optim.SGD(others or none, lr=lr))


# Apart from the others, for it needs its own optimizer, and PyTorch 2.9.
MU_LOCO = Case(MuLoCo, {"min_numel": 0}, muon)
ALL = {
    "local_sgd": Case(LocalSGD),
    "post_local_sgd": Case(PostLocalSGD, {"first_phase": 3}),
    "slow_mo": Case(SlowMo),
    "diloco": Case(DiLoCo),
    "diloco, 8 bits": Case(DiLoCo, {"codec": "minmax_uint8", "min_numel": 0}),
    "diloco, sign": Case(DiLoCo, {"codec": "sign", "exact": (), "min_numel": 0}),
    "diloco, 2 bits": Case(DiLoCo, {"codec": "two_magnitudes", "exact": (), "min_numel": 0}),
    "streaming": Case(DiLoCo, {"fragments": 2, "delay": 1, "blend": 0.5}),
    "delayed": Case(DiLoCo, {"delay": 3}),
    # With small blocks, so that small models have parameters that are dense.
    "sparse_loco": Case(SparseLoCo, {"codec": ChunkedTopK(4, 32), "dense": "absmax_int8:block=32"}),
    "sparse_loco, delayed": Case(SparseLoCo, {"codec": ChunkedTopK(4, 32), "delay": 2, "reduce": "mean"}),
}


def cases(*kept: str) -> list[Any]:
    """Returns all cases as values of a parameter; those that are not named run with `--all` only."""
    marks = {name: () if name in kept else pytest.mark.beyond for name in ALL}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in ALL.items()]


def follow(
    communicator: Communicator,
    case: Case,
    steps: int,
    *,
    momentum: float = 0.0,
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    lr: Callable[[int], float] = falling,
    **options: Any,
) -> list[torch.Tensor]:
    """Trains on one rank; returns the parameters before each step and after the last one, with what is due then."""
    module = Quadratic(shapes, dtype)
    task = Task(flat(module).numel())
    optimizer = torch.optim.SGD(module.parameters(), lr=lr(0), momentum=momentum)
    model = case.make(module, optimizer, communicator, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.zero_grad()
        task.loss(model, communicator.rank, step).backward()
        optimizer.step()
    with torch.no_grad():
        task.loss(model, communicator.rank, steps)
    model.close()
    return module.seen


def trained(case: Case, size: int, steps: int = 20, **options: Any) -> torch.Tensor:
    """Returns what `follow` returns on all ranks, shape (steps + 1, ranks, d)."""
    everyone = run_ranks(size, lambda c: follow(c, case, steps, **options))
    return torch.stack([torch.stack(seen) for seen in everyone], dim=1)


class Tensors(nn.Module):
    """Parameters of given shapes, whose gradients are set by hand."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
        fill(self)


def normal(shape: Any, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(each * 1000**place for place, each in enumerate(seed)))
    return torch.randn(shape, generator=generator)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, *seed: int) -> None:
    """A step with gradients that are given by a seed."""
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = normal(parameter.shape, number + 1, *seed).to(parameter.dtype)
    optimizer.step()
