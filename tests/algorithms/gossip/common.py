"""The decentralized algorithms, their simulations, and a model whose gradients NumPy knows to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_kernels.algorithms import (
    D2,
    Algorithm,
    Choco,
    Decentralized,
    LowPrecisionDecentralized,
    StochasticGradientPush,
)
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import (
    Complete,
    GivenMatrix,
    OnePeerExponential,
    Ring,
    ShiftOne,
    StaticExponential,
    Topology,
    Torus,
)
from tests.oracles import gossip
from tests.oracles.gossip import F64, SGD, Floats

SIZES = (2, 3, 4, 5, 7, 8)
# The sizes of tensors are divisible by nothing; the buckets of a run hold one or several of them.
SHAPES = {"first": (13, 11), "bias": (13,), "second": (7, 3, 5), "scale": ()}
BUCKET_BYTES = 500

PEERS: dict[str, Callable[[int], Topology]] = {
    "ring": Ring,
    "all": Complete,
    "shift_one": ShiftOne,
    "torus": Torus,
    "exponential": StaticExponential,
    "one_peer_exponential": OnePeerExponential,
}


def quarters(size: int) -> Topology:
    """A ring without negative eigenvalues, for which `D2` asks: half for a rank itself, a quarter for each neighbour."""
    w = np.eye(size) / 2
    for rank in range(size):
        w[rank, (rank + 1) % size] += 0.25
        w[rank, (rank - 1) % size] += 0.25
    return GivenMatrix(size, w.tolist())


def unequal(size: int) -> Topology:
    """A directed graph, of which rank 0 sends to all, and the others to the next one."""
    out = [range(1, size), *([(rank + 1) % size] for rank in range(1, size))]
    return GivenMatrix(size, gossip.column_stochastic(size, out).tolist())


@dataclass(frozen=True)
class Case:
    """An algorithm, and what simulates it.

    Attributes:
        kind: the class.
        simulation: makes the simulation.
        peers: the topology of some ranks, as tests use it unless they name another.
        options: of the constructor.
    """

    kind: Callable[..., Algorithm]
    simulation: Callable[..., gossip.Simulation]
    peers: Callable[[int], Topology]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, module: nn.Module, optimizer: Any, communicator: Communicator, **options: Any) -> Algorithm:
        defaults = {"peers": self.peers(communicator.size), "bucket_bytes": BUCKET_BYTES}
        return self.kind(module, optimizer, communicator=communicator, **{**defaults, **self.options, **options})


# Codecs without loss, so that a difference is no question of rounding to levels.
ETA = 0.6
LOSSLESS = {"codec": "identity"}
CASES = {
    "decentralized": Case(Decentralized, gossip.DPSGD, Ring),
    "low_precision": Case(LowPrecisionDecentralized, partial(gossip.DCD, through=gossip.exact), Ring, LOSSLESS),
    "choco": Case(Choco, partial(gossip.Choco, through=gossip.exact, eta=ETA), Ring, {**LOSSLESS, "eta": ETA}),
    "d2": Case(D2, gossip.D2, quarters),
    "push": Case(StochasticGradientPush, gossip.PushSum, OnePeerExponential),
    "push_unequal": Case(StochasticGradientPush, gossip.PushSum, unequal),
}
# The five classes with what users would write, codecs with loss among it.
ALL: dict[str, Case] = {
    **{name: CASES[name] for name in ("decentralized", "d2", "push")},
    "low_precision": Case(LowPrecisionDecentralized, CASES["low_precision"].simulation, Ring),
    "choco": Case(Choco, CASES["choco"].simulation, Ring, {"codec": "minmax_uint4", "eta": 0.3}),
}


class Quadratic(nn.Module):
    """h |p - b|^2 / 2 over all parameters: gradients are h (p - b), with two roundings.

    Attributes:
        seen: the parameters as one vector, as each forward pass in training has found them.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter((torch.rand(shape, generator=generator) - 0.4).to(dtype)))
        self.seen: list[torch.Tensor] = []

    def forward(self, h: float, b: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(flat(self))
        places = b.split([p.numel() for p in self.parameters()])
        return torch.stack(
            [
                (p * (h * (p.detach() - part.view(p.shape)))).sum()
                for p, part in zip(self.parameters(), places, strict=True)
            ]
        ).sum()


def flat(module: nn.Module) -> torch.Tensor:
    """All parameters, one behind the other, in the order of registration."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


@dataclass(frozen=True)
class Task:
    """Ranks with minima and curvatures of their own, that change a little in each step.

    Attributes:
        d: number of parameters.
        seed: of all random numbers.
        skips: steps of a rank that it does not take, as (rank, step).
    """

    d: int
    seed: int = 0
    skips: frozenset[tuple[int, int]] = frozenset()

    def h(self, rank: int) -> float:
        return 0.75 + 0.125 * (rank % 5)

    def b(self, rank: int, step: int) -> Floats:
        own = np.random.default_rng([self.seed, rank]).standard_normal(self.d)
        draw = np.random.default_rng([self.seed, rank, step]).standard_normal(self.d)
        return (own + 0.1 * draw).astype(np.float32)

    def gradient(self, rank: int, step: int, x: Floats) -> Floats | None:
        if (rank, step) in self.skips:
            return None
        return np.asarray(x.dtype.type(self.h(rank)) * (x - self.b(rank, step).astype(x.dtype)))

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(self.h(rank), torch.from_numpy(self.b(rank, step)))


def falling(step: int) -> float:
    """A learning rate that changes from step to step, and does not become so small that rounding errors stay."""
    return 0.75 if step % 3 == 0 else 0.5


def trained(
    case: Case,
    size: int,
    steps: int = 20,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> F64:
    """Returns the parameters of all ranks before each step and after the last one, shape (steps + 1, ranks, d)."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        return follow(communicator, case, steps, momentum=momentum, weight_decay=weight_decay, dtype=dtype, **options)

    everyone = run_ranks(size, rank)
    return np.stack([np.stack([x.double().numpy() for x in seen]) for seen in everyone], axis=1)


def follow(
    communicator: Communicator,
    case: Case,
    steps: int,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **options: Any,
) -> list[torch.Tensor]:
    """Trains on one rank; returns the parameters before each step and after the last one."""
    module = Quadratic(shapes, dtype)
    task = Task(flat(module).numel())
    optimizer = torch.optim.SGD(module.parameters(), lr=falling(0), momentum=momentum, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(step) / falling(0))
    model = case.make(module, optimizer, communicator, **options)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, communicator.rank, step).backward()
        optimizer.step()
        schedule.step()
    model.wait()
    module.seen.append(flat(module))
    model.close()
    return module.seen


def simulated(
    case: Case,
    topology: Topology | gossip.Matrices,
    steps: int = 20,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    interval: int = 1,
    skips: frozenset[tuple[int, int]] = frozenset(),
    dtype: torch.dtype = torch.float32,
) -> F64:
    """Returns what `trained` returns, from the simulation in float64."""
    start = flat(Quadratic(dtype=dtype)).double().numpy()
    matrices = topology.matrix if isinstance(topology, Topology) else topology
    task = Task(len(start), skips=skips)
    simulation = case.simulation(
        start, matrices, task.gradient, SGD(falling, momentum, weight_decay), interval=interval
    )
    return np.stack([simulation.x.copy(), *(simulation.step() for _ in range(steps))])


def error(found: F64, expected: F64) -> float:
    """The largest difference of a run from its simulation, relative to the largest magnitude of the last step."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected[-1]).max())
