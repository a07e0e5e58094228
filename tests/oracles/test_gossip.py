"""The simulations of decentralized algorithms against the forms of the papers, against each other, and against theorems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm.topology import Graph, OnePeerExponential, Ring, StaticExponential, Topology, Torus
from tests.grids import grid
from tests.oracles import gossip
from tests.oracles.gossip import F64, SGD, Floats

D = 9
# Graphs whose matrix is symmetric, with eigenvalues above -1/3.
SYMMETRIC = {
    "ring3": Ring(3).matrix(),
    "ring5": Ring(5).matrix(),
    "lazy_ring4": gossip.lazy(Ring(4).matrix()),
    "lazy_ring8": gossip.lazy(Ring(8).matrix()),
    "metropolis": gossip.lazy(Graph(6, [(0, 1), (1, 2), (1, 3), (3, 4), (4, 5), (5, 3)]).matrix()),
}


def always(w: F64) -> gossip.Matrices:
    return lambda round_: w


def quadratic(ranks: int, seed: int = 0, noise: float = 0.0) -> Callable[[int, int, Floats], Floats]:
    """Gradients of h_i |x - b_i|^2 / 2, each rank with its own h and b."""
    rng = np.random.default_rng(seed)
    h, b = rng.uniform(0.5, 1.5, (ranks, 1)), rng.standard_normal((ranks, D))

    def gradient(rank: int, step: int, x: Floats) -> Floats:
        draw = np.random.default_rng([seed, rank, step]).standard_normal(D)
        return (h[rank] * (x - b[rank]) + noise * draw).astype(x.dtype)

    return gradient


def optimum(ranks: int, seed: int = 0) -> F64:
    rng = np.random.default_rng(seed)
    h, b = rng.uniform(0.5, 1.5, (ranks, 1)), rng.standard_normal((ranks, D))
    return (h * b).sum(axis=0) / h.sum()


def falling(step: int) -> float:
    return 0.3 * 0.9**step


def simulated(
    kind: type[gossip.Simulation], matrices: gossip.Matrices, steps: int = 20, momentum: float = 0.0, **options: Any
) -> F64:
    """Returns the parameters of all ranks after each step, shape (steps, ranks, D)."""
    gradient = quadratic(len(matrices(0)), noise=0.1)
    simulation = kind(np.ones(D), matrices, gradient, SGD(falling, momentum), **options)
    return np.stack([simulation.step() for _ in range(steps)])


def differ(a: F64, b: F64) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@grid(cover=1, w=SYMMETRIC)
def test_d2_equals_its_form_with_two_vectors(w: F64) -> None:
    """Tang et al.: the old gradient counts with the old learning rate."""
    gradient = quadratic(len(w), noise=0.1)
    x = np.ones((len(w), D))
    before = last = np.zeros_like(x)
    expected = []
    for step in range(20):
        g = np.stack([gradient(rank, step, x[rank]) for rank in range(len(w))])
        half = x - falling(step) * g if step == 0 else 2 * x - before - falling(step) * g + last
        before, last = x, falling(step) * g
        x = w @ half
        expected.append(x)
    assert differ(simulated(gossip.D2, always(w)), np.stack(expected)) <= 1e-12
    assert differ(simulated(gossip.D2, always(w), flows=False), np.stack(expected)) <= 1e-12


@grid(cover=1, w=SYMMETRIC)
def test_identities_of_codecs_without_loss(w: F64) -> None:
    adapt = simulated(gossip.AdaptThenCombine, always(w))
    combine = simulated(gossip.DPSGD, always(w))
    assert differ(simulated(gossip.DCD, always(w), through=gossip.exact), combine) <= 1e-12
    assert differ(simulated(gossip.Choco, always(w), through=gossip.exact, eta=1.0), adapt) <= 1e-12
    assert differ(adapt, combine) > 1e-3


@grid(cover=1, topology=[Ring(5), StaticExponential(6), OnePeerExponential(8)])
def test_push_sum_on_a_doubly_stochastic_graph_has_no_weights(topology: Topology) -> None:
    expected = simulated(gossip.AdaptThenCombine, topology.matrix)
    assert differ(simulated(gossip.PushSum, topology.matrix), expected) <= 1e-12


def irregular(size: int) -> F64:
    """Rank 0 sends to all, the others to the next one."""
    return gossip.column_stochastic(size, [range(1, size), *([(rank + 1) % size] for rank in range(1, size))])


@grid(cover=1, size=[2, 3, 5, 8])
def test_push_sum_equals_its_form_with_a_numerator(size: int) -> None:
    w, gradient = irregular(size), quadratic(size, noise=0.1)
    n, weights = np.ones((size, D)), np.ones((size, 1))
    expected = []
    for step in range(20):
        z = n / weights
        n = w @ (n - falling(step) * np.stack([gradient(rank, step, z[rank]) for rank in range(size)]))
        weights = w @ weights
        expected.append(n / weights)
    assert differ(simulated(gossip.PushSum, always(w)), np.stack(expected)) <= 1e-12


@pytest.mark.parametrize("size", [3, 5, 8])
def test_push_sum_finds_the_mean_with_unequal_degrees(size: int) -> None:
    """The mass of values and weights stays; without the weights the mean would be that of those that are heard most."""
    w, start = irregular(size), np.random.default_rng(size).standard_normal((size, D))
    simulation = gossip.PushSum(start, always(w), lambda *_: None, SGD(falling))
    for _ in range(200):
        simulation.step()
        assert np.allclose(simulation.numerator.sum(axis=0), start.sum(axis=0), atol=1e-12)
        assert math.isclose(simulation.weights.sum(), size, abs_tol=1e-12)
        assert (simulation.weights > 0).all()
    assert np.allclose(simulation.x, start.mean(axis=0), atol=1e-12)
    assert np.abs(simulation.numerator - start.mean(axis=0)).max() > 0.05


def test_momentum_and_weight_decay_are_those_of_torch() -> None:
    x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    theirs = torch.optim.SGD([x], lr=0.1, momentum=0.9, weight_decay=0.01)
    ours, mine = SGD(lambda step: 0.1, 0.9, 0.01), x.detach().numpy().copy()
    for step in range(4):
        g = np.sin(np.arange(4.0) + step)
        x.grad = torch.from_numpy(g)
        theirs.step()
        mine = ours(0, step, mine, g)
    assert np.allclose(x.detach().numpy(), mine, rtol=1e-14)


@pytest.mark.slow
def test_d2_needs_no_equal_data() -> None:
    """With unequal minima and a constant learning rate D2 and exact means end at the common one, D-PSGD besides it."""
    w, size = gossip.lazy(Ring(8).matrix()), 8
    ends = {}
    for kind in (gossip.D2, gossip.DPSGD):
        simulation = kind(np.zeros(D), always(w), quadratic(size), SGD(lambda step: 0.1))
        for _ in range(1500):
            simulation.step()
        ends[kind] = np.abs(simulation.x - optimum(size)).max()
    assert ends[gossip.D2] <= 1e-10
    assert ends[gossip.DPSGD] > 0.05


@grid(cover=1, topology=[Ring(4), Graph(5, [(0, 1), (1, 2), (2, 3), (3, 4)])])
def test_d2_by_flows_keeps_the_mean_better_in_float32(topology: Topology) -> None:
    """Errors of mixing that stay in the corrections move the mean in all later steps."""
    w, drift = gossip.lazy(topology.matrix()), {}
    start = np.random.default_rng(0).standard_normal((topology.size, 200)).astype(np.float32)
    for flows in (False, True):
        simulation = gossip.D2(start, always(w), lambda *_: None, SGD(falling), flows=flows)
        for _ in range(1000):
            simulation.step()
        drift[flows] = np.abs(simulation.x.mean(axis=0, dtype=np.float64) - start.mean(axis=0, dtype=np.float64)).max()
    assert drift[True] <= drift[False] / 4


def coarse(values: Floats, rank: int, round_: int) -> Floats:
    """Rounds at random to one of the 15 multiples of the largest magnitude, without bias."""
    draw = np.random.default_rng([7, rank, round_]).random(values.shape)
    unit = max(np.abs(values).max(), 1e-300) / 7
    return np.asarray(np.floor(values / unit + draw) * unit, values.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("through", [coarse, gossip.exact])
def test_choco_keeps_the_mean_and_finds_it(through: gossip.Through) -> None:
    start = np.random.default_rng(3).standard_normal((8, D))
    simulation = gossip.Choco(start, Ring(8).matrix, lambda *_: None, SGD(falling), through=through, eta=0.3)
    for _ in range(600):
        simulation.step()
        assert np.allclose(simulation.gap, Ring(8).matrix() @ simulation.own - simulation.own, atol=1e-12)
        assert np.allclose(simulation.x.mean(axis=0), start.mean(axis=0), atol=1e-12)
    assert gossip.distance(simulation.x) <= 1e-12


@grid(topology=[Ring(2), Ring(3), Ring(5), StaticExponential(7), Ring(8), Graph(5, [(0, 1), (1, 2), (2, 3), (3, 4)])],
      seed=[0, 1], cover=1)  # fmt: skip
def test_mixing_in_float32_is_that_of_float64_rounded(topology: Topology, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((topology.size, 1000))
    narrow = gossip.mixed(topology.matrix(), x.astype(np.float32))
    assert narrow.dtype == np.float32
    wide = gossip.mixed(topology.matrix(), x.astype(np.float32).astype(np.float64))
    assert np.abs(narrow - wide).max() <= (topology.size + 1) * 2.0**-24 * np.abs(x).max() * 2


def test_equal_weights_are_a_division() -> None:
    """A third of three equal numbers is nearly the number: with weights in float32 it would grow in the average."""
    x = np.tile(np.random.default_rng(0).uniform(1, 2, 1000).astype(np.float32), (3, 1))
    third = np.float32(1 / 3)
    grown = ((x[0] * third + x[1] * third) + x[2] * third - x[0]).astype(np.float64).mean()
    assert grown > 1e-8
    assert abs((gossip.mixed(Ring(3).matrix(), x) - x).astype(np.float64).mean()) < grown / 4


def test_slopes() -> None:
    """Of two decays the slower one remains."""
    steps = np.arange(60)
    distances = 3.0 * 0.9**steps + 50.0 * 0.3**steps
    assert gossip.slope(distances, 20) == pytest.approx(math.log(0.9), rel=1e-4)
    assert gossip.slope(distances) < 1.05 * math.log(0.9)


@pytest.mark.parametrize(
    ("topology", "rho"),
    [(Ring(4), 1 / 3), (Ring(8), 0.805), (Ring(16), 0.949), (Torus(16), 0.6), (StaticExponential(16), 0.6)],
    ids=str,
)
def test_expected_slopes_are_those_of_the_table(topology: Topology, rho: float) -> None:
    found = math.exp(gossip.expected_slope([topology.matrix()]) / 2)
    assert found == pytest.approx(rho, abs=1e-3)


def test_a_finite_time_has_no_slope() -> None:
    matrices = [OnePeerExponential(8).matrix(step) for step in range(3)]
    assert gossip.expected_slope(matrices) == -math.inf
    assert math.isfinite(gossip.expected_slope(matrices[:2]))


def lazy_path() -> F64:
    return gossip.lazy(Graph(3, [(0, 1), (1, 2)]).matrix())


def test_nodes_average_before_they_mix() -> None:
    nodes, w = [[0, 3], [1], [2, 4, 5]], lazy_path()
    x = np.random.default_rng(0).standard_normal((6, D))
    mixed = w @ np.stack([x[node].mean(axis=0) for node in nodes])
    found = gossip.hierarchical(w, nodes) @ x
    for node, expected in zip(nodes, mixed, strict=True):
        assert np.allclose(found[node], expected)


@pytest.mark.parametrize("kind", [gossip.DPSGD, gossip.AdaptThenCombine, gossip.D2, gossip.PushSum])
def test_rounds_come_at_their_interval(kind: type[gossip.Simulation]) -> None:
    """Between rounds ranks train by themselves."""
    seen: list[int] = []

    def matrices(round_: int) -> F64:
        seen.append(round_)
        return Ring(3).matrix()

    simulation = kind(np.ones(D), matrices, quadratic(3), SGD(falling), interval=3)
    seen.clear()
    alone = kind(np.ones(D), always(np.eye(3)), quadratic(3), SGD(falling))
    for step in range(6):
        together, apart = simulation.step(), alone.step()
        assert np.allclose(together, apart) == (step < 2)
    assert seen == [0, 1]
