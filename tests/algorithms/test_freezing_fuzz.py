"""Random trainings in which parameters are frozen, trained again and left unused, step by step and rank by rank."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, GradientAllReduce, PowerSGD
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import fill
from tests.algorithms.test_freezing import MODES, OWN, ROWS
from tests.grids import grid, only

STEPS, LAYERS, WIDTH, RATE = 9, 5, 9, 0.05
PASSES = {"powersgd": lambda *args, **kw: PowerSGD(*args, rank=2, min_compression=0.5, **kw)}
ALL_ROWS = {**ROWS, **PASSES}
# What was applied and what is remembered add up to all gradients.
CONSERVE = ("allreduce", "sign", "onebit", "double_squeeze", "topk", "randomk", "powersgd", "powersgd_in_turn")
ADAMS = ("qadam", "onebit_adam", *OWN)


class Choice(nn.Module):
    """Layers of which each forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n % 2 == 0) for n in range(LAYERS))
        fill(self)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = torch.tanh(self.layers[number](x))
        return x


class Plan:
    """The same on all ranks: what is frozen in each step, and which layers each rank uses."""

    def __init__(self, seed: int, ranks: int) -> None:
        draw = random.Random(seed)
        names = [name for name, _ in Choice().named_parameters()]
        self.frozen: list[set[str]] = []
        self.used: list[list[list[int]]] = []
        frozen: set[str] = set()
        for _ in range(STEPS):
            if draw.random() < 0.6:
                frozen = {name for name in names if draw.random() < 0.35}
            trained = sorted({int(name.split(".")[1]) for name in names if name not in frozen})
            if not trained:
                frozen, trained = set(), list(range(LAYERS))
            self.frozen.append(set(frozen))
            # Each rank's gradients need one layer that is trained.
            self.used.append(
                [
                    sorted({draw.choice(trained), *(n for n in range(LAYERS) if draw.random() < 0.5)})
                    for _ in range(ranks)
                ]
            )
        self.bucket_bytes = draw.choice([1, 400, 900, 10 << 20])


def check_training(name: str, mode: str, seed: int, ranks: int) -> None:
    plan = Plan(seed, ranks)

    def rank(communicator: Communicator) -> tuple[list[dict[str, torch.Tensor]], dict, dict, dict]:
        module, plain = Choice(), Choice()
        options = {"communicator": communicator, "bucket_bytes": plan.bucket_bytes, **MODES[mode]}
        if mode == "after":
            algorithm: Algorithm = ALL_ROWS[name](module, **options)
            optimizer = getattr(algorithm, "optimizer", None) or torch.optim.SGD(module.parameters(), lr=RATE)
        else:
            optimizer = optim.SGD(module.parameters(), lr=RATE)
            algorithm = ALL_ROWS[name](module, optimizer, **options)
        start = {n: p.detach().clone() for n, p in module.named_parameters()}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        history = []
        for step in range(STEPS):
            frozen, used = plan.frozen[step], plan.used[step][communicator.rank]
            for n, p in module.named_parameters():
                p.requires_grad_(n not in frozen)
            before = {n: p.detach().clone() for n, p in module.named_parameters()}
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + communicator.rank))
            plain.load_state_dict(before)
            plain.zero_grad()
            plain(x, used).square().mean().backward()
            for n, p in plain.named_parameters():
                if n not in frozen and p.grad is not None:
                    total[n] += p.grad
            optimizer.zero_grad()
            algorithm(x, used).square().mean().backward()
            optimizer.step()
            for n, p in module.named_parameters():
                if n in frozen:
                    assert p.grad is None
                    assert torch.equal(p, before[n]), (n, step)
            history.append({n: p.detach().clone() for n, p in module.named_parameters()})
        applied = {n: (start[n] - p.detach()).div(RATE) for n, p in module.named_parameters()}
        remembered = algorithm.algorithm_state_dict()["vectors"]
        algorithm.close()
        return history, total, applied, remembered

    everyone = run_ranks(ranks, rank)
    for step, states in enumerate(zip(*(history for history, *_ in everyone), strict=True)):
        for other in states[1:]:
            for n, value in states[0].items():
                assert torch.equal(value, other[n]), (n, step)
    if name not in CONSERVE:
        return
    for n, applied in everyone[0][2].items():
        mean = torch.stack([total[n] for _, total, _, _ in everyone]).mean(0)
        lacking = torch.zeros_like(mean)
        for _, _, _, remembered in everyone:
            for key in ("worker", "owner", "residual"):
                if n in remembered.get(key, {}):
                    lacking += remembered[key][n].view(mean.shape) / ranks
        assert torch.allclose(applied + lacking, mean, atol=2e-4), n


CASES = [(name, mode) for name in ALL_ROWS for mode in MODES if mode == "after" or name not in ADAMS]


@grid(
    name=only(ALL_ROWS, *list(ALL_ROWS)[::4]),
    mode=list(MODES),
    where=lambda name, mode: (name, mode) in CASES,
    cover=1,
)
def test_random_freezing(name: str, mode: str) -> None:
    seed = sum(map(ord, name + mode))
    check_training(name, mode, seed=seed, ranks=2 + seed % 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_random_freezing_at_length(name: str, mode: str) -> None:
    for seed in range(8):
        check_training(name, mode, seed=1000 + seed, ranks=2 + seed % 2)


def test_the_oracle_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are halved on their way do not add up."""

    class Half(Mean):
        def run(self, step):  # type: ignore[no-untyped-def]
            yield from super().run(step)
            self.bucket.flat.mul_(0.5)

    class Halving(GradientAllReduce):
        name = "halving"

        def exchange_for(self, bucket, communicator):  # type: ignore[no-untyped-def]
            return Half(bucket, communicator)

    monkeypatch.setitem(ALL_ROWS, "allreduce", Halving)
    with pytest.raises(AssertionError, match="layers"):
        check_training("allreduce", "after", seed=1, ranks=2)
