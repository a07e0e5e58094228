"""Short trainings that a GPU and a CPU repeat: the same model, data and algorithms, without a random generator of PyTorch."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, from_spec, names
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.compressed import CompressedAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from bench.gpu.cases import digest
from bench.gpu.inputs import vector

INPUTS, OUTPUTS, BATCH = 24, 8, 16
# Sizes that are divisible by little, so that spans in buckets need padding.
WIDTHS = (41, 37)
STEPS = 16
RANKS = 2
RATE = 0.05
# The network of 60 parameters that processes train, and the algorithms that they do it with.
DEEP = (INPUTS,) * 29
DEEP_STEPS = 30
BY_PROCESSES = ("allreduce", "bytegrad", "qadam", "powersgd", "local_sgd")
# Seconds that one rank waits for the other, which may be compiling kernels.
TIMEOUT = {"cpu": 120.0, "cuda": 25.0}

# Whose results depend on the time that a rank takes, so that the loss has no value to be compared with.
TIMED = ("async_decentralized", "async_model_average", "wagma", "auto")
# These exchange vectors of the host.
CPU_ONLY = ("async_decentralized",)
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"interval": 4} for name in ("local_sgd", "slow_mo", "diloco", "mu_loco", "sparse_loco")},
    "post_local_sgd": {"interval": 4, "first_phase": 4},
    "async_model_average": {"interval_ms": 1},
    "wagma": {"period": 4},
    "randomk": {"ratio": 0.2},
    "powersgd": {"rank": 2},
    "choco": {"eta": 0.5},
}


class Network(nn.Module):
    """Linear layers with tanh between them, and parameters that are the same on every machine."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, scale: float = 1.0) -> None:
        super().__init__()
        sizes = (INPUTS, *widths, OUTPUTS)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        with torch.no_grad():
            for place, layer in enumerate(layers):
                weight, bias = layer.weight, layer.bias
                drawn = vector("normal", weight.numel(), salt=100 + place).view_as(weight)
                weight.copy_(drawn * (scale / math.sqrt(weight.shape[1])))
                bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.layers[-1](x)
        return result


def batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; each rank and each step has its own."""
    x = vector("normal", BATCH * INPUTS, salt=1000 + 64 * step + rank).view(BATCH, INPUTS)
    y = torch.stack([x[:, i : i + 3].sum(1).clamp(-1, 1) for i in range(OUTPUTS)], 1)
    return x.to(device), y.to(device)


def wrapped(
    name: str, module: nn.Module, communicator: Communicator | None, **more: Any
) -> tuple[Algorithm, torch.optim.Optimizer]:
    """An algorithm with its optimizer, and options under which small tensors are compressed."""
    kind = Algorithm.registered[name]
    options = {**OPTIONS.get(name, {}), **more}
    if issubclass(kind, CompressedAllReduce) and not issubclass(kind, MomentumAllReduce):
        options = {"warmup_steps": 0, "min_numel": 0, "exact": (), **options}
    if issubclass(kind, MomentumAllReduce):
        algorithm = from_spec(name, module, communicator=communicator, **{"freeze_step": 4, "lr": 3e-3, **options})
        own: Any = algorithm
        return algorithm, own.optimizer
    optimizer: torch.optim.Optimizer
    if name == "mu_loco":
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() != 2]
        optimizer = optim.ChainedOptimizer(optim.Muon(matrices, lr=RATE), optim.SGD(others, lr=RATE))
    else:
        # `DGC` has a momentum of its own.
        optimizer = optim.SGD(module.parameters(), lr=RATE, momentum=0.0 if name == "dgc" else 0.9)
    return from_spec(name, module, optimizer, communicator=communicator, **options), optimizer


@dataclass(frozen=True)
class Trained:
    """What one rank has after its steps.

    Attributes:
        loss: the mean over the last four steps of the losses of this rank.
        first: the loss of the first step.
        parameters: the digest of all parameters.
        backward_ms: the median time that the host spends in a backward pass.
    """

    loss: float
    first: float
    parameters: str
    backward_ms: float


def train(
    communicator: Communicator,
    name: str,
    device: torch.device,
    scale: float = 1.0,
    steps: int = STEPS,
    widths: tuple[int, ...] = WIDTHS,
    around_step: Callable[[int, Callable[[], None]], None] = lambda step, take: take(),
    **options: Any,
) -> Trained:
    """Trains on one rank.

    Args:
        communicator: joins the ranks.
        name: the algorithm.
        device: of the parameters.
        scale: factor of the first parameters.
        steps: their number.
        widths: of the hidden layers.
        around_step: is called for each step with a function that takes it.
        **options: further options of the algorithm.
    """
    algorithm, optimizer = wrapped(name, Network(widths, scale).to(device), communicator, **options)
    # Before the first step, since an upload waits for the GPU.
    data = [batch(communicator.rank, step, device) for step in range(steps)]
    losses: list[torch.Tensor] = []
    seconds: list[float] = []

    def take(step: int) -> None:
        optimizer.zero_grad()
        x, y = data[step]
        loss = (algorithm(x) - y).square().mean()
        start = time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - start)
        optimizer.step()
        losses.append(loss.detach())

    for step in range(steps):
        around_step(step, lambda step=step: take(step))  # type: ignore[misc]
    if isinstance(algorithm, ModelAlgorithm):
        # Only then all ranks have the same parameters.
        algorithm.synchronize()
    parameters = digest(torch.cat([p.detach().flatten().cpu() for p in algorithm.parameters()]))
    values = [float(loss) for loss in losses]
    algorithm.close()
    host = round(1e3 * statistics.median(seconds[2:]), 3)
    return Trained(sum(values[-4:]) / len(values[-4:]), values[0], parameters, host)


def by_threads(
    name: str, device: torch.device, scale: float = 1.0, steps: int = STEPS, widths: tuple[int, ...] = WIDTHS
) -> list[Trained]:
    """Trains with ranks that are threads of this process."""
    return run_ranks(RANKS, train, name, device, scale, steps, widths, timeout=TIMEOUT[device.type], device=device)


def cpu_losses() -> dict[str, list[float]]:
    """For each algorithm the loss at the end, the loss after a start that differs in the last digits, and the first loss."""
    torch.set_num_threads(1)
    device, found = torch.device("cpu"), {}
    sizes: dict[str, tuple[int, tuple[int, ...]]] = dict.fromkeys(names(), (STEPS, WIDTHS))
    sizes |= {f"deep {name}": (DEEP_STEPS, DEEP) for name in BY_PROCESSES}
    for name, (steps, widths) in sizes.items():
        kind = name.removeprefix("deep ")
        plain, moved = (by_threads(kind, device, scale, steps, widths)[0] for scale in (1.0, 1.0 + 1e-6))
        found[name] = [round(value, 8) for value in (plain.loss, moved.loss, plain.first)]
    return found


def gap(name: str, loss: float, losses: Mapping[str, list[float]]) -> tuple[float, float]:
    """The relative difference of a loss from the CPU's, and the largest one that rounding can explain.

    A start that differs by a millionth shows how far rounding alone moves a loss.
    """
    plain, moved, _ = losses[name]
    most = 0.5 if name in TIMED else max(0.01, 4 * abs(moved - plain) / plain)
    return abs(loss - plain) / plain, most
