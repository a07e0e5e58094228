"""Gossip steps bit for bit, and what theory says of them: means, speeds, finite times and push-sum's mass."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bagua_kernels.comm.topology import Complete, Graph, OnePeerExponential, Ring, Topology, Torus
from tests.algorithms.gossip.common import ALL, CASES, PEERS, SIZES, Case, quarters, unequal
from tests.algorithms.gossip.steps import D, expected, gossiped, spread
from tests.grids import grid, only
from tests.oracles import gossip
from tests.oracles.gossip import Floats

EPS = 2.0**-23


def path(size: int) -> Topology:
    return Graph(size, [(rank, rank + 1) for rank in range(size - 1)])


@grid(case=CASES, size=SIZES[2:] + SIZES[:2], cover=1)
def test_gossip_steps_bit_for_bit(case: Case, size: int) -> None:
    start = spread(size)
    assert np.array_equal(gossiped(case, start, 6), expected(case, case.peers(size), start, 6))


@grid(peers=list(PEERS), size=[2, 3, 4, 5, 8], cover=1)
def test_topologies_bit_for_bit(peers: str, size: int) -> None:
    case, start = CASES["decentralized"], spread(size)
    assert np.array_equal(gossiped(case, start, 5, peers=peers), expected(case, PEERS[peers](size), start, 5))


@pytest.mark.slow
@grid(dtype=[torch.bfloat16, torch.float16], peers=[Ring, Complete, path], size=[3, 5], cover=1)
def test_halves_are_mixed_in_float32(dtype: torch.dtype, peers: Callable[[int], Topology], size: int) -> None:
    """A step rounds once: what float32 makes of the sum of 16-bit values becomes one of 16 bits."""
    topology = peers(size)
    seen = gossiped(CASES["decentralized"], spread(size), 4, dtype, peers=topology)
    for step in range(1, 5):
        mixed = torch.from_numpy(gossip.mixed(topology.matrix(step), seen[step - 1]))
        assert np.array_equal(seen[step], mixed.to(dtype).float().numpy())


# What keeps the mean, with loss or without. DCD keeps it in expectation only.
MEANS = {
    **{name: CASES[name] for name in ("decentralized", "low_precision", "choco", "d2", "push")},
    "choco_4_bits": ALL["choco"],
}


def steps_of_means(seen: Floats) -> Floats:
    """By how much the mean changes in each step, as a part of what rounding in one step explains."""
    bound = 8 * EPS * np.abs(seen[0]).max() * max(1.0, math.log2(seen.shape[1]))
    return np.abs(np.diff(seen.astype(np.float64).mean(axis=1), axis=0)).max(axis=1) / bound


@grid(case=MEANS, size=SIZES, cover=1)
def test_the_mean_stays(case: Case, size: int) -> None:
    assert steps_of_means(gossiped(case, spread(size), 12)).max() <= 1


@pytest.mark.slow
@grid(
    name__peers=[("d2", "lazy_ring"), ("choco", "ring"), ("push", "one_peer_exponential")],
    steps=[60, pytest.param(150, marks=pytest.mark.beyond)],
)
def test_the_mean_stays_in_long_runs(name: str, peers: str, steps: int) -> None:
    """Rounding errors of a step do not come back in later ones."""
    assert steps_of_means(gossiped(CASES[name], spread(3), steps, peers=peers)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("decentralized", Ring(5)),
        pytest.param("decentralized", Ring(8), marks=pytest.mark.beyond),
        ("decentralized", path(4)),
        pytest.param("decentralized", Torus(8), marks=pytest.mark.beyond),
        ("decentralized", OnePeerExponential(5)),
        ("low_precision", Ring(7)),
        ("choco", Ring(8)),
        ("push", Ring(8)),
    ],
    ids=str,
)
def test_distances_decay_as_the_topology_predicts(name: str, topology: Topology) -> None:
    """The logarithm of the squared distance from the mean falls by 2 log rho per step, within 3 %."""
    matrices = [topology.matrix(step) for step in range(topology.window)]
    if name == "choco":  # with eta, each rank moves a part of the way
        eta = CASES["choco"].options["eta"]
        matrices = [np.eye(topology.size) * (1 - eta) + eta * w for w in matrices]
    slope, window = gossip.expected_slope(matrices), topology.window
    burn_in = window * math.ceil(6 / window)
    # Until rounding in float32 is a thousandth of what is left.
    steps = burn_in + min(10 * window, int(math.log(1e-9) / slope - burn_in) // window * window)
    seen = gossiped(CASES[name], spread(topology.size), steps, peers=topology)
    distances = [gossip.distance(x) for x in seen[::window]]
    found = gossip.slope(distances, burn_in // window) / window
    assert found == pytest.approx(slope, rel=0.03)


@grid(cover=1, size=[2, 4, 8], name=["decentralized", "push"])
def test_one_peer_exponential_is_exact_after_a_period(name: str, size: int) -> None:
    """Integers, whose means of a power of two are exact in float32."""
    start = np.random.default_rng(size).integers(-1000, 1000, (size, D)).astype(np.float32)
    rounds = int(math.log2(size))
    seen = gossiped(CASES[name], start, rounds, peers="one_peer_exponential")
    first = rounds if name == "decentralized" else rounds - 1
    assert (seen[first] == start.mean(axis=0)).all()
    assert first == 0 or not (seen[first - 1] == start.mean(axis=0)).all()


@grid(cover=1, size=only([2, 3, 5, 8], 3, 8))
def test_push_sum_keeps_its_mass(size: int) -> None:
    """All ranks end at the mean though rank 0 is heard by all and the others by one; numerators alone would not."""
    start = spread(size)
    seen = gossiped(CASES["push_unequal"], start, 60, peers=unequal(size))
    mean = start.astype(np.float64).mean(axis=0)
    assert np.abs(seen[-1] - mean).max() <= 1e-6 * np.abs(start).max()
    w = unequal(size).matrix()
    limit = np.linalg.matrix_power(w, 400)[:, 0] * size  # the weights that ranks end with
    assert np.abs(limit - 1).max() > 0.1 or size == 2


@pytest.mark.parametrize("name", ["decentralized", "d2"])
def test_complete_graphs_agree_after_a_step(name: str) -> None:
    """Every rank holds the mean; of D2 each rank rounds its own correction."""
    start = spread(5)
    seen = gossiped(CASES[name], start, 2, peers="all")
    assert name == "d2" or (seen[-1] == seen[-1][0]).all()
    assert np.abs(seen[-1][0] - start.astype(np.float64).mean(axis=0)).max() <= 8 * EPS * np.abs(start).max()


def test_quarters_are_what_d2_needs() -> None:
    assert np.linalg.eigvalsh(quarters(4).matrix()).min() >= -1e-12
    assert math.isclose(np.linalg.eigvalsh(Ring(4).matrix()).min(), -1 / 3)
