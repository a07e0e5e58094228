"""Every centralized algorithm against a simulation of its ranks in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import (
    DGC,
    SignSGD,
    TernGrad,
)
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.rows import ROWS, Row, every_kind
from tests.algorithms.training import FULL, ODD, STEPS, Given, averaged, draw, everything, pairs, same, train
from tests.grids import grid, only
from tests.oracles.algorithms import Shapes


def check(row: Row, shapes: Shapes, ranks: int) -> None:
    data = draw(shapes, ranks)
    means, states = train(row.make, shapes, data)
    simulation = row.simulate(shapes, ranks)
    size = {name: max(np.abs(g[name]).max() for everyone in data for g in everyone) for name in shapes}
    for step, (everyone, mean) in enumerate(zip(data, means, strict=True)):
        expected = simulation.step(everyone)
        assert mean.keys() == expected.keys()
        for name in shapes:
            error = np.abs(mean[name] - expected[name]).max()
            assert error <= row.tolerance * size[name], (step, name)
    for rank, state in enumerate(states):
        for key, vectors in simulation.remembered(rank).items():
            for name, expected in vectors.items():
                found = state["vectors"].get(key, {}).get(name, torch.zeros(shapes[name])).numpy()
                # What is remembered has gone through all steps.
                error = np.abs(found.reshape(-1) - expected.reshape(-1)).max()
                assert error <= STEPS * row.tolerance * size[name], (rank, key, name)


@grid(
    row=ROWS,
    ranks__shapes={"1 odd": (1, ODD), "2 full": (2, FULL), "2 odd": (2, ODD), "3 odd": (3, ODD), "4 full": (4, FULL)},
    cover=1,
)
def test_against_the_simulation(row: Row, shapes: Shapes, ranks: int) -> None:
    check(row, shapes, ranks)


@pytest.mark.parametrize(
    "name", only(["bytegrad", "qsgd", "sign", "topk", "dgc", "powersgd", "terngrad_shared"], "bytegrad", "topk")
)
def test_against_the_simulation_of_many(name: str) -> None:
    check(ROWS[name], FULL, 8)


def test_dgc_trains_as_sgd_with_momentum() -> None:
    """The same parameters, to rounding, as `torch.optim.SGD` with the mean gradients makes."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Given(ODD)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        algorithm = DGC(module, optimizer, communicator=communicator, ratio=1.0, masking=False, **everything(DGC))
        for everyone in data:
            optimizer.zero_grad()
            algorithm({n: torch.from_numpy(g) for n, g in everyone[communicator.rank].items()}).backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    data = draw(ODD, 2)
    plain = Given(ODD)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for mean in averaged(data):
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.from_numpy(np.asarray(mean[name], np.float32))
        optimizer.step()
    for ours, expected in zip(run_ranks(2, rank)[0], plain.parameters(), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_dgc_keeps_the_velocity_of_what_was_not_sent() -> None:
    """The residual of element 1 becomes 0 by itself in step 1, u = -1 and v = 1 - 1; only what was sent loses its velocity."""
    data = [[{"p": np.array([8, first, 0, 0], np.float32)} for _ in range(2)] for first in (1, -1.5, 0)]
    means, states = train(DGC, {"p": (4,)}, data, ratio=0.25, momentum=0.5, masking=True)
    assert [mean["p"].tolist() for mean in means] == [[8, 0, 0, 0]] * 3
    assert states[0]["vectors"]["velocity"]["p"].tolist() == [0, -0.5, 0, 0]
    assert states[0]["vectors"]["worker"]["p"].tolist() == [0, -0.5, 0, 0]


@grid(cover=1, ranks=[2, 3, 4])
def test_votes_are_signs(ranks: int) -> None:
    """Unit gradients; ties, zeros and negative zeros are +1."""
    data = draw(ODD, ranks)
    for everyone in data:
        for rank, named in enumerate(everyone):
            named["bias"] = np.where(np.arange(13) < 6, (-1.0) ** rank, -0.0).astype(np.float32)
    for mean in train(SignSGD, ODD, data, majority_vote=True).means:
        assert all(set(np.unique(g)) <= {-1.0, 1.0} for g in mean.values())
        assert np.all(mean["bias"] == 1)


NO_BIAS = ("qsgd", "qsgd_2_bits", "bytegrad_stochastic", "terngrad", "terngrad_shared", "natural")


@pytest.mark.slow
@pytest.mark.parametrize("name", only([*NO_BIAS, "fp8_e5m2_stochastic"], *NO_BIAS))
def test_random_rounding_has_no_bias(name: str) -> None:
    """U = N |mean - v|^2 / E |C(v) - v|^2 is 1 on average, with a standard deviation of about sqrt(2 / n)."""
    shapes: Shapes = {"p": (1024,)}
    data = draw(shapes, 2, 1) * 120
    means = [mean["p"].astype(np.float64) for mean in train(ROWS[name].make, shapes, data).means]
    exact = averaged(data[:1])[0]["p"]
    variance = np.mean([np.sum((m - exact) ** 2) for m in means])
    assert 0.7 < len(means) * np.sum((np.mean(means, axis=0) - exact) ** 2) / variance < 1.35


@pytest.mark.parametrize("options", [{}, {"shared": True}])
def test_terngrad_trains_a_scalar(options: dict[str, Any]) -> None:
    """One element has no deviation to which it could be clipped."""
    data = [[{"scale": np.array(2.0, np.float32)} for _ in range(2)]]
    assert train(TernGrad, {"scale": ()}, data, **options).means[0]["scale"] == 2


@every_kind
def test_twice_the_same(row: Row) -> None:
    data = draw(ODD, 3, 4)
    first, second = (train(row.make, ODD, data) for _ in range(2))
    assert same(first.means, second.means)
    for one, other in zip(first.states, second.states, strict=True):
        assert all(torch.equal(a, b) for a, b in pairs(one, other))
