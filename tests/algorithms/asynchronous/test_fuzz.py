"""Random trainings by asynchronous algorithms: whatever the order of events, no step of any rank is lost or counts twice."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, DiLoCo, Wagma
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.mailbox.groups import Butterfly, Shuffled, Whole
from bagua_kernels.comm.topology import Graph
from tests.algorithms.ranks import fill


class Net(nn.Module):
    """Layers of random sizes, of which each rank uses some in each step."""

    def __init__(self, draws: random.Random) -> None:
        super().__init__()
        self.width = draws.randint(1, 9)
        self.layers = nn.ModuleList(
            nn.Linear(self.width, draws.randint(1, 40), bias=draws.random() < 0.5) for _ in range(draws.randint(1, 5))
        )
        self.scale = nn.Parameter(torch.rand(()))
        self.tied = self.layers[0].weight
        fill(self)
        for layer in self.layers[1:]:
            if draws.random() < 0.2:
                layer.requires_grad_(False)

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        parts = [layer(x).square().mean() for number, layer in enumerate(self.layers) if number in used]
        return torch.stack([*parts, self.scale.square()]).sum()


@dataclass(frozen=True)
class Training:
    """What a training is made of."""

    seed: int
    size: int
    kind: Any
    options: dict[str, Any]
    dtype: torch.dtype
    optimizer: Any
    steps: tuple[int, ...]  # of each rank
    pauses: tuple[float, ...]  # seconds a step of each rank, at most
    middle: tuple[str, ...]  # collective calls between halves of the steps
    bucket_bytes: int

    @classmethod
    def draw(cls, seed: int) -> Training:
        draws = random.Random(seed)
        size = draws.randint(2, 6)
        kind = draws.choice([Wagma, Wagma, AsyncModelAverage, AsyncDecentralized])
        options: dict[str, Any] = {}
        if kind is Wagma:
            options = {"period": draws.choice([1, 2, 5, None]), "activate": draws.choice(["group", "all"])}
            groups: list[Any] = [Shuffled(size, draws.randint(2, size), seed), Whole(size), None]
            options["groups"] = Butterfly(4, 2) if size == 4 and draws.random() < 0.5 else draws.choice(groups)
        elif kind is AsyncModelAverage:
            options = draws.choice([{"interval_ms": 0}, {"interval_ms": 2}, {"interval": draws.randint(1, 4)}])
        elif draws.random() < 0.5:
            edges = [(rank, draws.randrange(rank)) for rank in range(1, size)]
            options = {"topology": Graph(size, edges), "codec": draws.choice([None, "minmax_uint8:block=64"])}
        optimizer = draws.choice(
            [
                lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
                lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
                lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
            ]
        )
        most = draws.choice([3, 12])
        return cls(
            seed,
            size,
            kind,
            options,
            draws.choice([torch.float32, torch.float32, torch.float64]),
            optimizer,
            tuple(most if draws.random() < 0.5 else draws.randint(0, most) for _ in range(size)),
            tuple(draws.choice([0.0, 0.001, 0.004]) for _ in range(size)),
            tuple(draws.sample(["synchronize", "averaged", "consensus", "state"], draws.randint(0, 2))),
            draws.choice([64, 500, 10 << 20]),
        )


def run(training: Training) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Trains; returns the parameters at the start, what each rank's steps have added, and the mean at the end."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draws = random.Random(f"{training.seed} {communicator.rank}")
        module = Net(random.Random(training.seed)).to(training.dtype)
        optimizer = training.optimizer([p for p in module.parameters() if p.requires_grad])
        options = {"bucket_bytes": training.bucket_bytes, **training.options}
        model = training.kind(module, optimizer, communicator=communicator, **options)
        parameters = [p for p in module.parameters() if p.requires_grad]

        def value() -> torch.Tensor:
            return torch.cat([p.detach().double().flatten() for p in parameters])

        start = value()
        added, before = torch.zeros_like(start), [start]
        # After the algorithm's own hook, which brings in what is owed.
        optimizer.register_step_pre_hook(lambda *_: before.append(value()))
        optimizer.register_step_post_hook(lambda *_: added.add_(value() - before.pop()))
        steps = training.steps[communicator.rank]
        for place, half in enumerate((range(steps // 2), range(steps // 2, steps))):
            for number in half:
                x = torch.randn(3, module.width, dtype=training.dtype, generator=torch.Generator().manual_seed(number))
                used = {layer for layer in range(len(module.layers)) if draws.random() < 0.7}
                optimizer.zero_grad()
                model(x, used).backward()
                if draws.random() < 0.2:
                    module(x, used).backward()
                time.sleep(training.pauses[communicator.rank] * draws.random())
                optimizer.step()
                if draws.random() < 0.2:
                    model.eval()
                    with torch.no_grad():
                        model(x, used)
                    model.train()
            if place == 0:
                for call in training.middle:
                    collective(model, call)
        model.synchronize()
        end = value()
        model.close()
        return start, added, end

    return run_ranks(training.size, rank)


def collective(model: Any, call: str) -> None:
    """A call that all ranks make."""
    if call == "synchronize":
        model.synchronize()
    elif call == "averaged":
        with model.averaged():
            pass
    elif call == "consensus":
        assert model.consensus() >= 0
    else:
        model.algorithm_state_dict()


def check(training: Training) -> None:
    """All ranks end with the start plus the mean of what all steps have added."""
    results = run(training)
    starts, added, ends = (torch.stack(list(parts)) for parts in zip(*results, strict=True))
    assert (ends == ends[0]).all(), training
    expected = starts[0] + added.mean(0)
    scale = float(expected.abs().max() + added.abs().sum(0).max())
    limit = 1e-12 if training.dtype == torch.float64 and training.kind is not AsyncDecentralized else 1e-5
    assert float((ends[0] - expected).abs().max()) <= limit * max(scale, 1.0), training


def test_draws_have_everything() -> None:
    drawn = [Training.draw(seed) for seed in range(300)]
    assert {each.kind for each in drawn} == {Wagma, AsyncModelAverage, AsyncDecentralized}
    assert {call for each in drawn for call in each.middle} == {"synchronize", "averaged", "consensus", "state"}
    assert sum(0 in each.steps for each in drawn) > 20
    assert sum(each.options.get("codec") is not None for each in drawn) > 10


@pytest.mark.parametrize("first", [pytest.param(k, marks=pytest.mark.slow if k else ()) for k in range(0, 120, 5)])
def test_no_step_is_lost(first: int) -> None:
    for seed in range(first, first + 5):
        check(Training.draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_quorums_end_with_equal_models(seed: int) -> None:
    """Random quorums, nets, delays and numbers of steps: all ranks end with the same bits, which are finite."""
    for number in range(4 * seed, 4 * seed + 4):
        draws = random.Random(number)
        size = draws.randint(2, 5)
        options: dict[str, Any] = {"quorum": draws.randint(1, size), "grace": draws.choice([0.0, 0.002])}
        options |= {"interval": draws.choice([2, 4])}
        options |= draws.choice([{}, {"delay": 1}, {"fragments": 2, "delay": 0}, {"delay": 1, "blend": 0.5}])
        options |= draws.choice([{}, {"codec": "absmax_int4", "exact": (), "min_numel": 0}])
        steps = tuple(draws.randint(0, 14) for _ in range(size))
        middle = tuple(draws.sample(["synchronize", "averaged", "consensus", "state"], draws.randint(0, 2)))
        pauses = tuple(draws.choice([0.0, 0.001, 0.004]) for _ in range(size))
        training = Training(
            *(number, size, DiLoCo, options, draws.choice([torch.float32, torch.bfloat16])),
            *(
                lambda parameters: torch.optim.SGD(parameters, lr=0.02),
                steps,
                pauses,
                middle,
                draws.choice([64, 10 << 20]),
            ),
        )
        ends = torch.stack([end for *_, end in run(training)])
        assert ends.isfinite().all(), training
        assert (ends == ends[0]).all(), training
