"""What decentralized training reaches on a ring, beside all-reduce with the same start and the same examples.

Without any exchange, ranks would end at a distance of about 1.
`bench.convergence` compares more on real images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import DivergenceError

RANKS, BATCH, RATE, IMAGES = 8, 16, 0.1, 2000
NEAR, WORSE, CONSENSUS = 1.05, 1.25, 0.2
LOUD = "qsgd:bits=4,norm=l2,block=1024"  # alpha^2 is about 2
Deal = Callable[[int, int, int], torch.Tensor]


@dataclass(frozen=True)
class Reached:
    """What one rank has at the end.

    Attributes:
        loss: of the mean model, over all images.
        consensus: distance of the ranks from their mean before that.
        noise: alpha^2 of the codec, when it was last looked at.
        error: what ended the run early, if anything.
        finite: True if all parameters are finite.
    """

    loss: float = float("nan")
    consensus: float = 0.0
    noise: float = 0.0
    error: Exception | None = None
    finite: bool = True


@dataclass(frozen=True)
class Way:
    """A way to train."""

    kind: type[Algorithm]
    options: dict[str, Any] = field(default_factory=dict)


ALL_REDUCE = Way(algorithms.GradientAllReduce)
RING = Way(algorithms.Decentralized, {"peers": "ring"})
NEAR_AT_RANDOM = {
    "D-PSGD": RING,
    "DCD, 4 bits": Way(algorithms.LowPrecisionDecentralized, {"codec": "minmax_uint4:stochastic=true"}),
    "Choco, 2 bits": Way(algorithms.Choco, {"codec": "minmax_uint2:stochastic=true"}),
    "Choco, loud codec": Way(algorithms.Choco, {"codec": LOUD}),
}


@functools.cache
def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes of 8x8 pixels, sorted by class."""
    random = np.random.default_rng(0)
    labels = np.sort(random.integers(0, 10, IMAGES))
    pixels = np.maximum(random.normal(0, 1, (10, 64))[labels] + random.normal(0, 1.5, (IMAGES, 64)), 0)
    return torch.from_numpy(pixels.astype(np.float32)), torch.from_numpy(labels)


def at_random(seed: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(RANKS * (10_000 * seed + step) + rank)
    return torch.randint(IMAGES, (BATCH,), generator=generator)


def by_label(seed: int, step: int, rank: int) -> torch.Tensor:
    """As `at_random`, from a part of the images that has two or three classes."""
    part = IMAGES // RANKS
    return at_random(seed, step, rank) % part + rank * part


def train(communicator: Communicator, way: Way, deal: Deal, steps: int, seed: int) -> Reached:
    pixels, labels = images()
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    model = way.kind(module, optimizer, communicator=communicator, **way.options)
    try:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RATE if step < 0.7 * steps else 0.1 * RATE
            chosen = deal(seed, step, communicator.rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
            optimizer.step()
    except RuntimeError as error:
        return Reached(error=error, finite=all(bool(p.isfinite().all()) for p in module.parameters()))
    consensus = noise = 0.0
    if isinstance(model, algorithms.ModelAlgorithm):
        consensus = model.consensus()
        noise = model.noise() if hasattr(model, "noise") else 0.0
        model.synchronize()
    model.close()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(module(pixels), labels))
    return Reached(loss, consensus, noise)


def reached(way: Way, deal: Deal, steps: int, seed: int) -> Reached:
    """Returns what rank 0 has; the others have the same loss."""
    everyone = run_ranks(RANKS, train, way, deal, steps, seed)
    assert not [each.error for each in everyone if each.error]
    assert len({each.loss for each in everyone}) == 1
    return everyone[0]


lengths = pytest.mark.parametrize(("steps", "seed"), [(130, 0), pytest.param(400, 1, marks=pytest.mark.slow)])


@pytest.mark.slow
@lengths
def test_examples_at_random_train_as_with_all_reduce(steps: int, seed: int) -> None:
    expected = reached(ALL_REDUCE, at_random, steps, seed).loss
    assert expected < 0.5
    for name, way in NEAR_AT_RANDOM.items():
        if name != "Choco, 2 bits" and steps < 400:
            continue
        found = reached(way, at_random, steps, seed)
        print(f"{name}: {found.loss / expected:.3f}, {found.consensus:.3f}, {found.noise:.2f}")
        assert found.loss <= NEAR * expected, name
        assert 0 < found.consensus <= CONSENSUS, name
        assert way.options.get("codec") != LOUD or found.noise > 1


@pytest.mark.slow
@lengths
def test_examples_by_label_need_a_correction(steps: int, seed: int) -> None:
    expected = reached(ALL_REDUCE, by_label, steps, seed).loss
    plain, corrected = (reached(way, by_label, steps, seed).loss for way in (RING, Way(algorithms.D2)))
    print(plain / expected, corrected / expected)
    assert plain >= WORSE * expected
    assert corrected <= NEAR * expected


@pytest.mark.slow
@lengths
def test_guard_speaks_before_a_value_is_not_finite(steps: int, seed: int) -> None:
    """Differences of DCD grow with a codec that loses more than it sends."""
    everyone = run_ranks(
        RANKS, train, Way(algorithms.LowPrecisionDecentralized, {"codec": LOUD}), at_random, steps, seed
    )
    errors = [each.error for each in everyone]
    assert any(isinstance(error, DivergenceError) for error in errors), errors
    assert all(errors)
    assert all(each.finite for each in everyone)
