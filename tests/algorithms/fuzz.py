"""Random trainings, compared between ranks and with a simulation in plain PyTorch.

    python -m tests.algorithms.fuzz --threads 2000 --processes 300

Each training is drawn from its seed: the net, which layers which rank uses in which step, the optimizer and its options, and
whether its steps are taken in backward. `--first SEED --threads 1` repeats one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua_kernels import comm, optim
from bagua_kernels.algorithms import ByteGrad, GradientAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes

SAMPLES = 3
# Of Adam's and RMSprop's denominator: so large that rounding of a gradient near zero does not become a step.
EPS = 1e-2
# Between float32 and float64, relative to the distance that a parameter has gone and to 1. Measured: at most a tenth of it.
TOLERANCE = 1e-4
# Seconds that ranks wait for one that compiles kernels on a busy machine.
PATIENCE = 300


@dataclass(frozen=True)
class Training:
    """A training, drawn from a seed.

    Attributes:
        width: features of all layers.
        kinds: of each layer: "linear", "bare" (without bias), "norm", "scale" or "picture" (convolution, channels last).
        used: for each step, rank and layer whether it is part of the net.
        both: for each step and rank whether there is a backward pass within `no_sync` before, with the next step's layers.
        optimizer: name in `torch.optim`.
        options: of its groups; biases and other vectors have the second ones.
        early: True if steps are taken in backward.
        wrapper: options of the algorithm.
        lossy: True if gradients are sent in 8 bits, so that the simulation is not to be compared with the parameters.
        reload: steps before which the optimizer loads its own checkpoint.
        rates: for each step, factor of the learning rate.
    """

    seed: int
    ranks: int
    width: int
    kinds: tuple[str, ...]
    used: tuple[tuple[tuple[bool, ...], ...], ...]
    both: tuple[tuple[bool, ...], ...]
    optimizer: str
    options: tuple[dict[str, Any], dict[str, Any]]
    early: bool
    wrapper: dict[str, Any]
    lossy: bool
    reload: frozenset[int]
    rates: tuple[float, ...]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.used)


def draw(seed: int, ranks: int | None = None) -> Training:
    """A training from a seed, with two or three ranks if it is not given how many."""
    dice = random.Random(seed)
    count = dice.choice((2, 3))
    ranks = ranks or count
    kinds = tuple(dice.choices(("linear", "bare", "norm", "scale", "picture"), (5, 2, 2, 2, 1), k=dice.randint(1, 9)))
    steps = dice.choice((dice.randint(3, 12), dice.randint(3, 12), dice.randint(12, 50)))
    # Of each layer: how often a rank uses it. Some ranks never use a layer, some layers nobody does.
    chances = [[dice.choice((0.0, 0.15, 0.5, 0.5, 0.85, 1.0)) for _ in range(ranks)] for _ in kinds]
    together = [dice.random() < 0.3 for _ in kinds]
    used = []
    for _ in range(steps):
        agreed = [dice.random() for _ in kinds]
        used.append(
            tuple(
                tuple(
                    (common if same else dice.random()) < chance[0 if same else rank]
                    for chance, same, common in zip(chances, together, agreed, strict=True)
                )
                for rank in range(ranks)
            )
        )
    accumulates = dice.random() < 0.3
    both = tuple(tuple(accumulates and dice.random() < 0.3 for _ in range(ranks)) for _ in range(steps))
    name = dice.choice(("AdamW", "AdamW", "Adam", "RMSprop", "SGD"))
    early = dice.random() < 0.6
    wrapper: dict[str, Any] = {
        "bucket_bytes": dice.choice((1, 100, 500, 2000, 100_000)),
        "in_flight": dice.choice((1, 2)),
        "apply_in_backward": early,
    }
    return Training(
        seed=seed,
        ranks=ranks,
        width=dice.choice((3, 8, 11)),
        kinds=kinds,
        used=tuple(used),
        both=both,
        optimizer=name,
        options=(_options(dice, name), _options(dice, name)),
        early=early,
        wrapper=wrapper,
        lossy=dice.random() < 0.25,
        reload=frozenset(step for step in range(1, steps) if dice.random() < 0.05),
        rates=tuple(dice.choice((1.0, 1.0, 0.5)) for _ in range(steps)),
    )


def _options(dice: random.Random, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": dice.choice((0.01, 0.03)), "weight_decay": dice.choice((0.0, 0.1))}
    if name in ("Adam", "AdamW"):
        options |= {"betas": (dice.choice((0.5, 0.9)), 0.9), "eps": EPS, "amsgrad": dice.random() < 0.3}
    elif name == "RMSprop":
        options |= {"eps": EPS, "momentum": dice.choice((0.0, 0.5)), "centered": dice.random() < 0.3, "alpha": 0.9}
    else:
        options |= {"momentum": dice.choice((0.5, 0.9)), "dampening": dice.choice((0.0, 0.3))}
        options["nesterov"] = options["dampening"] == 0.0 and dice.random() < 0.5
    return options


class Net(nn.Module):
    """Layers with shortcuts around them, so that any of them may be left out."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.width = training.width
        self.layers = nn.ModuleList(_layer(kind, training.width) for kind in training.kinds)
        self.head = nn.Linear(training.width, 2)
        generator = torch.Generator().manual_seed(training.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
        for layer, there in zip(self.layers, used, strict=True):
            if there:
                x = torch.tanh(x + layer(x))
        return self.head(x).square().mean()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x[:, None, None, :].expand(-1, 2, 3, -1)).mean((1, 2))


def _layer(kind: str, width: int) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(width, width),
        "bare": lambda: nn.Linear(width, width, bias=False),
        "norm": lambda: nn.LayerNorm(width),
        "scale": _Scale,
        "picture": _Picture,
    }[kind]()


def _batch(training: Training, step: int, rank: int, extra: bool) -> torch.Tensor:
    seed = ((training.seed * 1009 + step) * 7 + rank) * 2 + extra
    return torch.randn(SAMPLES, training.width, generator=torch.Generator().manual_seed(seed % 2**63))


def _optimizer(library: Any, training: Training, net: nn.Module) -> torch.optim.Optimizer:
    params = list(net.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [
        {"params": some, **options} for some, options in zip((matrices, vectors), training.options, strict=True) if some
    ]
    return getattr(library, training.optimizer)(groups)  # type: ignore[no-any-return]


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


@dataclass
class Outcome:
    """What a training ended with: each parameter, and how many steps its state has counted (None without a state)."""

    parameters: list[torch.Tensor]
    counts: list[float | None]
    moved: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, net: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        params = list(net.parameters())
        states: list[dict[str, Any]] = [optimizer.state.get(p, {}) for p in params]
        counts = [float(s.get("step", 1)) if s else None for s in states]
        return cls([p.detach().clone() for p in params], counts)

    def digest(self) -> str:
        """Of all bits."""
        whole = hashlib.sha256(json.dumps(self.counts).encode())
        for parameter in self.parameters:
            whole.update(parameter.contiguous().numpy().tobytes())
        return whole.hexdigest()


def train(communicator: Communicator, training: Training) -> Outcome:
    """The training on a rank."""
    rank = communicator.rank
    net = Net(training)
    optimizer = _optimizer(optim, training, net)
    kind = ByteGrad if training.lossy else GradientAllReduce
    algorithm = kind(net, optimizer, communicator=communicator, **training.wrapper)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, used in enumerate(training.used):
        if step in training.reload:
            optimizer.load_state_dict(optimizer.state_dict())
        _set_rates(optimizer, rates, training.rates[step])
        optimizer.zero_grad()
        if training.both[step][rank]:
            with algorithm.no_sync():
                algorithm(_batch(training, step, rank, True), training.used[step - 1][rank]).backward()
        algorithm(_batch(training, step, rank, False), used[rank]).backward()
        optimizer.step()
    optimizer.state_dict()  # waits for what is under way
    outcome = Outcome.of(net, optimizer)
    algorithm.close()
    return outcome


def simulate(training: Training) -> Outcome:
    """The same by hand in float64: the sum of the ranks' gradients over their number; None where no rank has one."""
    net = Net(training).double()
    optimizer = _optimizer(torch.optim, training, net)
    rates = [group["lr"] for group in optimizer.param_groups]
    params = list(net.parameters())
    start = [p.detach().clone() for p in params]
    for step, used in enumerate(training.used):
        _set_rates(optimizer, rates, training.rates[step])
        sums: list[torch.Tensor | None] = [None] * len(params)
        for rank in range(training.ranks):
            passes = [(False, used[rank])]
            if training.both[step][rank]:
                passes.append((True, training.used[step - 1][rank]))
            for extra, layers in passes:
                loss = net(_batch(training, step, rank, extra).double(), layers)
                found = torch.autograd.grad(loss, params, allow_unused=True)
                sums = [g if s is None else s if g is None else s + g for s, g in zip(sums, found, strict=True)]
        for p, total in zip(params, sums, strict=True):
            p.grad = None if total is None else total / training.ranks
        optimizer.step()
    outcome = Outcome.of(net, optimizer)
    outcome.moved = [not torch.equal(p.detach(), q) for p, q in zip(params, start, strict=True)]
    return outcome


def differences(training: Training, outcome: Outcome, digests: Sequence[str]) -> Iterator[str]:
    """What differs between ranks, and between one of them and the simulation."""
    if len(set(digests)) != 1:
        yield f"ranks end with different bits: {[d[:8] for d in digests]}"
    expected = simulate(training)
    if outcome.counts != expected.counts:
        yield f"steps counted are {outcome.counts}, not {expected.counts}"
    beginning = [p.detach() for p in Net(training).parameters()]
    for i, (p, q, begin) in enumerate(zip(outcome.parameters, expected.parameters, beginning, strict=True)):
        if not expected.moved[i]:
            if not torch.equal(p, begin):
                yield f"parameter {i} has moved without a gradient"
        elif not training.lossy:
            distance = float((q - begin).abs().max())
            error = float((p - q).abs().max())
            if not error <= TOLERANCE * (1 + distance):
                yield f"parameter {i} is off by {error:.2e} after {distance:.2e}"


def by_turns(seed: int, name: str) -> Training:
    """Many layers in buckets of their own, each used by one rank or the other, or both, or none."""
    dice = random.Random(seed)
    layers, steps = 9, 60
    used = tuple(tuple(tuple(dice.random() < 0.4 for _ in range(layers)) for _ in range(2)) for _ in range(steps))
    return replace(
        draw(seed, 2),
        kinds=("bare",) * layers,
        used=used,
        both=((False, False),) * steps,
        optimizer=name,
        options=({"lr": 0.01},) * 2,
        early=True,
        wrapper={"bucket_bytes": 1, "apply_in_backward": True},
        lossy=False,
        reload=frozenset(),
        rates=(1.0,) * steps,
    )


def compared(training: Training) -> list[str]:
    """Runs a training with threads as ranks; returns what differs."""
    outcomes = run_ranks(training.ranks, train, training, timeout=PATIENCE)
    return list(differences(training, outcomes[0], [o.digest() for o in outcomes]))


def by_threads(seeds: Sequence[int]) -> dict[int, list[str]]:
    """Runs trainings with threads as ranks; returns what differs, by seed."""
    found = {}
    for seed in seeds:
        problems = compared(draw(seed))
        if problems:
            found[seed] = problems
    return found


def rank_of_processes(first: int, count: int, path: str) -> None:
    """One process's part of `count` trainings over one process group; rank 0 writes what differs to a file."""
    torch.set_num_threads(1)
    communicator = comm.init(timeout=PATIENCE)
    found = {}
    for seed in range(first, first + count):
        training = draw(seed, communicator.size)
        outcome = train(communicator, training)
        digests = [str(d) for d in communicator.all_gather_object(outcome.digest())]
        # The simulation of each is one rank's work.
        mine = [] if seed % communicator.size != communicator.rank else list(differences(training, outcome, digests))
        if mine:
            found[seed] = mine
        if seed % 20 == 0:
            gc.collect()
    everywhere = communicator.all_gather_object(found)
    if communicator.rank == 0:
        whole = {seed: problems for part in everywhere for seed, problems in part.items()}
        Path(path).write_text(json.dumps(whole))
    comm.shutdown()


def by_processes(first: int, count: int, size: int, timeout: float) -> dict[int, list[str]]:
    """Runs trainings with processes as ranks, all in one process group; returns what differs, by seed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        results = run_processes(rank_of_processes, size, args=(first, count, os.fspath(path)), timeout=timeout)
        if any(r.returncode for r in results):
            raise RuntimeError("\n".join(r.stderr[-2000:] for r in results if r.returncode))
        return {int(seed): problems for seed, problems in json.loads(path.read_text()).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings and prints what differs; the exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="trainings with threads as ranks")
    parser.add_argument("--processes", type=int, default=0, help="trainings with processes as ranks")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total = 0
    begin = time.monotonic()
    for part in range(0, options.threads, 50):
        end = min(part + 50, options.threads)
        found = by_threads(range(options.first + part, options.first + end))
        total += _tell(found, f"threads: {end} of {options.threads}", begin)
    done = 0
    for size, share in ((2, options.processes - options.processes // 2), (3, options.processes // 2)):
        for part in range(0, share, 50):
            count = min(50, share - part)
            found = by_processes(options.first + done, count, size, timeout=1800)
            done += count
            total += _tell(found, f"processes: {done} of {options.processes}", begin)
    print(f"{options.threads + options.processes} trainings, {total} with differences")
    return int(total > 0)


def _tell(found: dict[int, list[str]], progress: str, begin: float) -> int:
    for seed, problems in found.items():
        print(f"seed {seed}: {'; '.join(problems)}\n  {draw(seed)}")
    print(f"{progress}, {time.monotonic() - begin:.0f} s", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
