"""Topologies whose steps never bring the ranks together are refused, though all hear from all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import GivenMatrix, Graph, Needs, RandomMatching, Ring, Topology
from tests.grids import grid


@dataclass(frozen=True)
class Swaps(Topology):
    """Ranks 0 and 1 swap, then 1 and 2: all hear from all, and values only change places."""

    @property
    def period(self) -> int:
        return 2

    def _matrix(self, step: int) -> np.ndarray:
        return np.eye(3)[[1, 0, 2] if step == 0 else [0, 2, 1]]


@grid(
    cover=1,
    topology__mixes=[
        (GivenMatrix(2, [[0, 1], [1, 0]]), False),
        # Periodic: a ring of an even number of ranks whose neighbours count one half each, and no rank itself.
        (GivenMatrix(4, (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 2), False),
        (GivenMatrix(5, (np.roll(np.eye(5), 1, 0) + np.roll(np.eye(5), -1, 0)) / 2), True),
        (Swaps(3), False),
        # The slowest that mixes at all: a cycle with one shortcut has no zero from the power (P - 1)^2 + 1 on.
        (GivenMatrix(6, np.roll(np.eye(6), 1, 1) + np.outer(np.eye(6)[5], np.eye(6)[1])), True),
        (Graph(4, [(0, 1), (2, 3)]), False),
        (GivenMatrix(1, [[1]]), True),
    ],
)
def test_mixing_is_more_than_links(topology: Topology, mixes: bool) -> None:
    assert topology.mixes == mixes
    window = np.eye(topology.size, dtype=object)
    for step in range(topology.window):
        window = (topology.matrix(step) != 0).astype(int).astype(object) @ window
    assert (np.linalg.matrix_power(window, topology.size**2) != 0).all() == mixes
    assert not topology.doubly_stochastic or (topology.rho() < 1 - 1e-9) == mixes


@grid(cover=1, topology=[GivenMatrix(2, [[0, 1], [1, 0]]), Swaps(3)], needs=["rows", "columns", "doubly", "symmetric"])
def test_what_goes_round_for_ever_is_refused(topology: Topology, needs: Needs) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="values go round for ever: add links or self-weights"):
            topology.check(communicator, needs)

    run_ranks(topology.size, rank)


def test_weights_compute_a_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    matrix = Ring.matrix
    monkeypatch.setattr(Ring, "matrix", lambda self, step=0: (steps.append(step), matrix(self, step))[1])
    Ring(5).weights(2, 3)
    assert steps == [3]


@pytest.mark.parametrize("seed", [1.0, True, "1"])
def test_seeds_are_ints(seed: int) -> None:
    """They are hashed as text, in which equal values would differ."""
    with pytest.raises(ValueError, match="expected seed to be an int"):
        RandomMatching(4, seed)
