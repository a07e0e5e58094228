"""Where compression loses nothing, means are exact: full rank, exact parameters, warm-up, float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import (
    DGC,
    QSGD,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    FP8AllReduce,
    GradientAllReduce,
    NaturalCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.rows import PLAIN
from tests.algorithms.training import ODD, Everyone, Given, Wrap, averaged, draw, everything, train, velocities, worst
from tests.grids import grid
from tests.oracles.algorithms import Shapes
from tests.oracles.payloads import total


def low_rank(ranks: int, kept: int) -> list[Everyone]:
    """Gradients of full rank whose mean has a low one."""
    rng = np.random.default_rng(3)
    steps = []
    for _ in range(4):
        mean = rng.standard_normal((13, kept)) @ rng.standard_normal((kept, 11))
        noise = rng.standard_normal((ranks, 13, 11))
        noise -= noise.mean(axis=0)
        steps.append([{"m": (mean + n).astype(np.float32)} for n in noise])
    return steps


@grid(warm_start=[False, True], kept__rank=[(1, 1), (2, 2), (1, 2), (2, 4)], cover=1)
def test_powersgd_of_the_matrix_rank_is_exact(kept: int, rank: int, warm_start: bool) -> None:
    data = low_rank(3, kept)
    means, _ = train(PowerSGD, {"m": (13, 11)}, data, rank=rank, min_compression=0, warm_start=warm_start)
    assert worst(means, averaged(data), "m") <= 1e-4


@pytest.mark.parametrize("shape", [(4, 9), (9, 3), (2, 2, 3)], ids=str)
def test_powersgd_of_full_rank_is_exact(shape: tuple[int, ...]) -> None:
    data = draw({"m": shape}, 3)
    means, _ = train(PowerSGD, {"m": shape}, data, rank=4, min_compression=0)
    assert worst(means, averaged(data), "m") <= 1e-4


@grid(cover=1, nesterov=[False, True], exact={"all": (), "1d exact": "1d"})
def test_dgc_of_all_elements_is_sgd_with_momentum(nesterov: bool, exact: Any) -> None:
    """Also where parameters travel uncompressed: what arrives contains the momentum, and the optimizer adds none."""
    data = draw(ODD, 3)
    means, _ = train(DGC, ODD, data, ratio=1.0, masking=False, momentum=0.8, nesterov=nesterov, exact=exact)
    applied = velocities(averaged(data), 0.8, nesterov)
    assert max(worst(means, applied, name) for name in ODD) <= 1e-5


@pytest.mark.parametrize("ranks", [2, 3])
def test_identity_is_no_compression(ranks: int) -> None:
    data = draw(ODD, ranks)
    plain = train(GradientAllReduce, ODD, data).means
    for codec in ("identity", None):
        ours = train(CompressedAllReduce, ODD, data, codec=codec).means
        assert max(worst(ours, plain, name) for name in ODD) <= (0 if ranks == 2 else PLAIN)


def in_order(everyone: Everyone, name: str) -> np.ndarray:
    """The mean of docs/compressed-collectives.md: added in float32 in the order of the ranks, then divided."""
    return total([g[name] for g in everyone]) / np.float32(len(everyone))


@grid(
    exact=["1d", ("bias", "sc*"), ["*a*"]],
    wrap=[ByteGrad, SignSGD, QSGD, NaturalCompression, FP8AllReduce, DoubleSqueeze, TopK, DGC],
    cover=1,
)
def test_exact_parameters_are_exact(wrap: Wrap, exact: Any) -> None:
    data = draw(ODD, 3, 1 if wrap is DGC else 2)
    means, states = train(wrap, ODD, data, exact=exact)
    for everyone, mean in zip(data, means, strict=True):
        for name in ("bias", "scale"):
            assert np.array_equal(mean[name], in_order(everyone, name))
        assert not np.array_equal(mean["first"], in_order(everyone, "first"))
    for key, vectors in states[0]["vectors"].items():
        assert key == "velocity" or not {"bias", "scale"} & set(vectors)


@pytest.mark.parametrize("min_numel", [0, 14, 106, 1000])
def test_small_parameters_are_exact(min_numel: int) -> None:
    data = draw(ODD, 3)
    means, _ = train(TopK, ODD, data, min_numel=min_numel)
    for everyone, mean in zip(data, means, strict=True):
        for name, shape in ODD.items():
            if math.prod(shape) < min_numel:
                # With all of them exact the bucket is averaged by an ordinary all-reduce, which has an order of its own.
                assert np.allclose(mean[name], in_order(everyone, name), rtol=1e-6, atol=1e-7)


@grid(cover=1, wrap=[SignSGD, OneBitSGD, DoubleSqueeze, TopK, RandomK])
def test_small_parameters_are_exact_by_default_where_few_bits_are_sent(wrap: Wrap) -> None:
    shapes: Shapes = {"vector": (600,), "small": (7, 73), "large": (8, 64)}
    data = draw(shapes, 2, 2)
    options = {"warmup_steps": 0} if wrap is OneBitSGD else {}
    means, states = train(lambda *args, **kw: wrap(*args, **kw), shapes, data, **options)
    expected = averaged(data)
    assert max(worst(means, expected, name) for name in ("vector", "small")) <= PLAIN < worst(means, expected, "large")
    assert states[0]["vectors"]["worker"].keys() == {"large"}


def test_groups_without_compression_are_exact() -> None:
    data = draw(ODD, 3)
    means, _ = train(CompressedAllReduce, ODD, data, codec="sign", groups={"[fb]*": None})
    expected = averaged(data)
    assert max(worst(means, expected, name) for name in ("first", "bias")) <= PLAIN
    assert worst(means, expected, "second") > 0.01


@grid(cover=1, wrap=[ByteGrad, SignSGD, OneBitSGD, TopK, RandomK, QSGD, TernGrad, FP8AllReduce, DoubleSqueeze])
def test_warmup_is_no_compression(wrap: Wrap) -> None:
    data = draw(ODD, 3)
    means, _ = train(wrap, ODD, data, warmup_steps=3)
    expected = averaged(data)
    assert max(worst(means[:3], expected[:3], name) for name in ODD) <= PLAIN
    assert worst(means[3:], expected[3:], "first") > 1e-4


def test_powersgd_starts_without_compression() -> None:
    data = draw(ODD, 3)
    means, states = train(PowerSGD, ODD, data[:3], start_step=3)
    assert max(worst(means, averaged(data[:3]), name) for name in ODD) <= PLAIN
    assert all(float(r.norm()) == 0 for r in states[0]["vectors"]["residual"].values())


@grid(cover=1, wrap=[ByteGrad, SignSGD, TopK, DGC, PowerSGD])
def test_float64_modules(wrap: Wrap) -> None:
    shapes: Shapes = {"first": (13, 11), "bias": (13,)}
    data = draw(shapes, 2, 2)

    def rank(communicator: Communicator) -> list[dict[str, torch.Tensor]]:
        algorithm = wrap(Given(shapes, torch.float64), communicator=communicator, **everything(wrap))
        means = []
        for everyone in data:
            algorithm.zero_grad()
            algorithm({n: torch.from_numpy(g).double() / 3 for n, g in everyone[communicator.rank].items()}).backward()
            means.append({n: p.grad.clone() for n, p in algorithm.module.named_parameters() if p.grad is not None})
        return means

    for mean, expected in zip(run_ranks(2, rank)[0], averaged(data), strict=True):
        assert mean["bias"].dtype == torch.float64
        if wrap is not DGC:
            assert np.allclose(mean["bias"].numpy(), expected["bias"] / 3, rtol=1e-12)
