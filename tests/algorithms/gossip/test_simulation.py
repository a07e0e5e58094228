"""Every decentralized algorithm against a simulation of all its ranks in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms.gossip.mixing import topology_of
from bagua_kernels.comm.topology import Complete, GivenMatrix, Graph, OnePeerExponential, RandomMatching, Ring, Topology
from tests.algorithms.gossip.common import (
    CASES,
    PEERS,
    SIZES,
    Case,
    Quadratic,
    error,
    flat,
    simulated,
    trained,
)
from tests.grids import grid
from tests.oracles import gossip

TOLERANCE = 1e-6


def tree(size: int) -> Topology:
    """Ranks of different degrees, with Metropolis weights."""
    return Graph(size, [(rank, (rank - 1) // 2) for rank in range(1, size)])


def lazy_tree(size: int) -> Topology:
    """The same for `D2`, without negative eigenvalues."""
    return GivenMatrix(size, gossip.lazy(tree(size).matrix()).tolist())


def lazy_ring(size: int) -> Topology:
    """What `D2` advises for a ring of an even number of ranks."""
    return GivenMatrix(size, gossip.lazy(Ring(size).matrix()).tolist())


def chain(size: int) -> Topology:
    """The connected graph with the fewest edges that some rank ends."""
    return topology_of("chain", size)


def random(size: int) -> Topology:
    return RandomMatching(size, 3)


@grid(case=CASES, size=SIZES, cover=1)
def test_twenty_steps(case: Case, size: int) -> None:
    topology = case.peers(size)
    assert error(trained(case, size), simulated(case, topology)) <= TOLERANCE


@grid(peers=list(PEERS), size=SIZES[::-1], cover=1)
def test_peers_by_name(peers: str, size: int) -> None:
    """Names of topologies mean what `comm.topology` calls so, one matrix for each round."""
    case = CASES["decentralized"]
    assert error(trained(case, size, 9, peers=peers), simulated(case, PEERS[peers](size), 9)) <= TOLERANCE


def test_random_peers() -> None:
    """Pairs are drawn anew in each round, equal on all ranks: one rank's parameters spread, and the mean is that of steps."""
    found = trained(CASES["decentralized"], 5, 8, peers="random")
    alone = simulated(CASES["decentralized"], lambda round_: np.eye(5), 8)
    assert gossip.distance(found[-1]) < 0.7 * gossip.distance(alone[-1])


OTHERS: dict[str, list[Callable[[int], Topology]]] = {
    "decentralized": [tree, random],
    "low_precision": [Complete, tree],
    "choco": [Complete, tree],
    "d2": [Complete, lazy_tree, lazy_ring, chain],
    "push": [Ring, tree, random],
}


@pytest.mark.slow
@grid(name__peers=[(name, peers) for name, several in OTHERS.items() for peers in several], size=[4, 5, 8], cover=1)
def test_other_topologies(name: str, peers: Callable[[int], Topology], size: int) -> None:
    case = CASES[name]
    assert error(trained(case, size, peers=peers(size)), simulated(case, peers(size))) <= TOLERANCE


@pytest.mark.slow
@grid(case=CASES, options=[{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.01}], cover=1)
def test_optimizers_with_states(case: Case, options: dict[str, float]) -> None:
    """Velocities stay with their rank; decay is that of the parameters that a step begins with."""
    topology = case.peers(4)
    # Velocities lengthen the way that rounding errors take.
    assert error(trained(case, 4, **options), simulated(case, topology, **options)) <= 3 * TOLERANCE


@grid(case=CASES, interval=[2, 3, 5], cover=1)
def test_intervals(case: Case, interval: int) -> None:
    """Rounds come in steps with (step + 1) % interval == 0, and count by themselves."""
    # One that changes in each round, where the algorithm takes such.
    changing = case in (CASES["decentralized"], CASES["push"])
    topology = OnePeerExponential(8) if changing else case.peers(3)
    size = topology.size
    found = trained(case, size, 11, interval=interval, peers=topology)
    assert error(found, simulated(case, topology, 11, interval=interval)) <= TOLERANCE


@pytest.mark.slow
@grid(
    nodes=[[[0, 1], [2, 3]], [[0, 3], [1, 2], [4, 5]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2]], [[0], [1], [2]]],
    peers=["ring", "one_peer_exponential"],
    cover=1,
)
def test_nodes_average_before_they_mix(nodes: list[list[int]], peers: str) -> None:
    """Topologies are then those of nodes; all ranks of a node mix the same. On one node, ranks mix as they do on several."""
    case, size = CASES["decentralized"], sum(map(len, nodes))
    members = nodes if len(nodes) > 1 else [[rank] for rank in range(size)]
    topology = PEERS[peers](len(members))

    def matrices(round_: int) -> gossip.F64:
        return gossip.hierarchical(topology.matrix(round_), members)

    found = trained(case, size, 12, hierarchical=True, nodes=nodes, peers=peers)
    assert error(found, simulated(case, matrices, 12)) <= TOLERANCE


@grid(cover=1, case=CASES)
def test_one_bucket_or_many(case: Case) -> None:
    """The size of buckets changes no bit."""
    small, large = (trained(case, 3, 5, bucket_bytes=size) for size in (1, 10 << 20))
    assert np.array_equal(small, large)


@pytest.mark.slow
@grid(case=CASES, dtype=[torch.bfloat16, torch.float16], cover=1)
def test_halves(case: Case, dtype: torch.dtype) -> None:
    """Parameters of 16 bits follow those of float32 with no more than their own rounding in each step."""
    found, expected = trained(case, 4, 10, dtype=dtype), simulated(case, case.peers(4), 10, dtype=dtype)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert np.abs(found - expected).max() <= 10 * unit * np.abs(expected).max()


def test_start_is_that_of_rank_0() -> None:
    """Before the first step all ranks hold the same."""
    for case in CASES.values():
        found = trained(case, 3, 1)
        assert np.array_equal(found[0], np.tile(flat(Quadratic()).double().numpy(), (3, 1)))
