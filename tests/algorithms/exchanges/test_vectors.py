"""Norms of gradients of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import DGC, TernGrad
from bagua_kernels.algorithms.exchanges.vectors import euclidean_norm
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.training import Given, Named, draw, follow
from tests.grids import grid
from tests.oracles.vectors import FLOAT32_MAX, FLOAT32_TINIEST, KINDS, make

SHAPES = {"matrix": (37, 29), "bias": (11,), "scale": ()}


@grid(cover=1, kind=KINDS, scale=[1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 3e38])
def test_norm_of_any_vector(kind: str, scale: float) -> None:
    x = make(kind, 1009, scale, 3)
    expected = np.linalg.norm(x.astype(np.float64))
    assert float(euclidean_norm(torch.from_numpy(x))) == pytest.approx(expected, rel=1e-5, abs=2.0**-149)


def test_norm_of_extremes() -> None:
    assert float(euclidean_norm(torch.full((9,), FLOAT32_MAX))) == pytest.approx(3 * FLOAT32_MAX)
    assert float(euclidean_norm(torch.full((9,), FLOAT32_TINIEST))) == pytest.approx(3 * FLOAT32_TINIEST)
    assert float(euclidean_norm(torch.zeros(9))) == 0
    assert float(euclidean_norm(torch.full((4,), 60000.0, dtype=torch.float16))) == 2 * float(
        torch.tensor(60000.0).half()
    )
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not euclidean_norm(torch.tensor([1.0, bad])).isfinite()


def test_norm_of_powers_of_two_times_a_vector_is_exact() -> None:
    x = torch.from_numpy(make("gaussian", 1009, 1.0, 3))
    once = euclidean_norm(x)
    for power in range(-100, 101):
        assert euclidean_norm(x * 2.0**power) == once * 2.0**power


def means(communicator: Communicator, kind: type, factor: float, options: dict[str, float]) -> list[Named]:
    algorithm = kind(Given(SHAPES), communicator=communicator, **options)
    own = [everyone[communicator.rank] for everyone in draw(SHAPES, 2, 2)]
    return follow(algorithm, [{name: np.asarray(g * np.float32(factor)) for name, g in named.items()} for named in own])


@pytest.mark.parametrize("clip", [0.5, 2.5])
def test_terngrad_of_a_multiple_is_the_multiple(clip: float) -> None:
    """For powers of two in every bit: the clip has units of the gradient."""
    once = run_ranks(2, means, TernGrad, 1.0, {"clip": clip})[0]
    for power in (-100, -80, -64, -20, 20, 64, 80, 100):
        again = run_ranks(2, means, TernGrad, 2.0**power, {"clip": clip})[0]
        for one, other in zip(once, again, strict=True):
            assert all(np.array_equal(one[name] * np.float32(2.0**power), other[name]) for name in one)
    for factor in (1e-30, 3e-25, 7e23, 1e30):
        again = run_ranks(2, means, TernGrad, factor, {"clip": clip})[0]
        for one, other in zip(once, again, strict=True):
            for name in one:
                # A value that lies on the edge between two levels may come out on the other one.
                equal = np.isclose(one[name], other[name] / factor, rtol=1e-5, atol=0)
                assert equal.mean() > 0.99 or one[name].size < 100


def test_dgc_clips_large_gradients_to_the_norm() -> None:
    """And does not multiply them by zero, which one over an infinite norm is."""
    for named in run_ranks(2, means, DGC, 1e25, {"clip": 1.0, "ratio": 1.0, "momentum": 0.0}):
        for mean in named:
            assert all(0.1 < np.linalg.norm(g) < 1 for g in mean.values())
