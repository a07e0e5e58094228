"""Topologies of one matrix for all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bagua_kernels.comm.topology.base import Matrix, Topology, uniform


@dataclass(frozen=True)
class Complete(Topology):
    """All with all, 1/P each: one step is an all-reduce, and costs more than one."""

    def _matrix(self, step: int) -> Matrix:
        return np.full((self.size, self.size), 1 / self.size)


@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours on a ring and itself, 1/3 each (Lian et al., D-PSGD, 2017); 1/2 each for two ranks."""

    def _matrix(self, step: int) -> Matrix:
        return uniform([{(rank - 1) % self.size, (rank + 1) % self.size} for rank in range(self.size)])


@dataclass(frozen=True)
class Torus(Topology):
    """A grid closed at its edges, rank r in row r // columns: the four neighbours and itself, 1/5 each.

    In a direction of two ranks both neighbours are one, in a direction of one rank there is none: the weights are
    then 1/4, 1/3 and so on. `columns` divides the size; 0 stands for the divisor that makes the sides differ least.
    """

    columns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = next(rows for rows in range(math.isqrt(self.size), 0, -1) if self.size % rows == 0)
        object.__setattr__(self, "columns", self.columns or self.size // rows)
        if self.columns < 1 or self.size % self.columns:
            raise ValueError(f"expected columns to divide {self.size=}, got {self.columns}")

    def _matrix(self, step: int) -> Matrix:
        cells = np.arange(self.size).reshape(-1, self.columns)
        moved = [np.roll(cells, by, axis).ravel().tolist() for axis in (0, 1) for by in (-1, 1)]
        return uniform([set(peers) for peers in zip(*moved, strict=True)])


@dataclass(frozen=True)
class StaticExponential(Topology):
    """Rank i sends to all i + 2^k mod P, k < m = ceil(log2 P); 1/(m + 1) each (Ying et al., NeurIPS 2021).

    For even P rho is (m - 1)/(m + 1), for odd P at most that. Directed: not symmetric for P > 3.
    """

    def _matrix(self, step: int) -> Matrix:
        hops = [2**k for k in range((self.size - 1).bit_length())]
        return uniform([{(rank - hop) % self.size for hop in hops} for rank in range(self.size)])


@dataclass(frozen=True)
class Graph(Topology):
    """Any undirected graph, with Metropolis weights 1/(1 + max(deg i, deg j)) (Xiao, Boyd and Lall, IPSN 2005).

    A rank keeps the rest for itself, so that W is symmetric and doubly stochastic. Edges are pairs of different ranks,
    in any order and direction, repeated or not.
    """

    edges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        for edge in self.edges:
            if len(edge) != 2 or edge[0] == edge[1] or not all(0 <= rank < self.size for rank in edge):
                raise ValueError(f"expected edges to be pairs of different ranks below {self.size}, got {tuple(edge)}")
        object.__setattr__(self, "edges", tuple(sorted({(int(min(edge)), int(max(edge))) for edge in self.edges})))

    def _matrix(self, step: int) -> Matrix:
        degrees = np.bincount(np.array(self.edges, dtype=np.int64).reshape(-1), minlength=self.size)
        w = np.zeros((self.size, self.size))
        for i, j in self.edges:
            w[i, j] = w[j, i] = 1 / (1 + int(max(degrees[i], degrees[j])))
        # fsum rounds once, whatever the order.
        w[np.diag_indices(self.size)] = [1 - math.fsum(row) for row in w]
        return w


@dataclass(frozen=True)
class Lazy(Topology):
    """(I + W) / 2 of another topology's W: each rank keeps half of its own value, and no eigenvalue is negative.

    `D2` asks for eigenvalues above -1/3. A plain ring of an even number of ranks has one of exactly -1/3.
    """

    size: int = field(init=False, default=0)
    of: Topology

    def __init__(self, of: Topology) -> None:
        """Takes the topology."""
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "size", of.size)
        self.__post_init__()

    @property
    def period(self) -> int | None:
        """That of the other topology."""
        return self.of.period

    def _matrix(self, step: int) -> Matrix:
        return (np.eye(self.size) + self.of.matrix(step)) / 2


@dataclass(frozen=True)
class GivenMatrix(Topology):
    """One matrix for all steps, as it is given: P rows of P finite weights >= 0, which may be an array."""

    rows: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        super().__post_init__()
        w = np.array(self.rows, dtype=np.float64) + 0.0  # -0.0 would be equal to 0.0 and yet read otherwise
        if w.shape != (self.size, self.size) or not np.isfinite(w).all() or (w < 0).any():
            raise ValueError(f"expected {self.size} rows of {self.size} finite weights >= 0, got shape {w.shape}\n{w}")
        object.__setattr__(self, "rows", tuple(map(tuple, w.tolist())))

    def _matrix(self, step: int) -> Matrix:
        return np.array(self.rows, dtype=np.float64)
