"""Topologies of another matrix in each step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bagua_kernels.comm.topology.base import Matrix, Topology, uniform


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In step k rank i sends to i + 2^(k mod m) mod P, m = ceil(log2 P); 1/2 each (Assran et al., SGP, 2019).

    If P is a power of two, m steps in a row yield the exact mean (Ying et al., NeurIPS 2021). One alone need not contract.
    """

    @property
    def period(self) -> int:
        """ceil(log2 P), and 1 for one rank."""
        return max(1, (self.size - 1).bit_length())

    def _matrix(self, step: int) -> Matrix:
        return uniform([{(rank - 2**step) % self.size} for rank in range(self.size)])


@dataclass(frozen=True)
class ShiftOne(Topology):
    """The two halves of the ranks pair up, shifted by one in every step; 1/2 each (BAGUA, `shift_one`).

    In step s rank r < P/2 pairs with (s + r) mod (P/2) + P/2. So every rank meets all of the other half in P/2 steps.
    With an odd number of ranks the second half lacks its last, whose partner idles. In (P + 1)/2 steps each rank of the
    first half does so once.
    """

    @property
    def period(self) -> int:
        """P/2, rounded up."""
        return (self.size + 1) // 2

    @property
    def mixes(self) -> bool:
        """True: in a period every rank of one half meets all of the other, and keeps a part of its own value."""
        return True

    def rho(self) -> float:
        """See `Topology.rho`; takes O(P^3), for a step takes the mean of pairs of rows."""
        product, ranks = np.eye(self.size), np.arange(self.size)
        for step in range(self.period):
            product = (product + product[[self._partner(rank, step) for rank in ranks.tolist()]]) / 2
        return float(np.linalg.norm(product - 1 / self.size, 2))

    def _partner(self, rank: int, step: int) -> int:
        """Returns with whom a rank pairs; itself if it idles."""
        half = self.period
        partner = (step + rank) % half + half if rank < half else (rank - half - step) % half
        return partner if partner < self.size else rank

    def _matrices(self) -> Iterator[Matrix]:
        # A step renames the ranks of one half. So the sums of all matrices, their symmetry and their degrees are those of the
        # first, and all P/2 of them would take O(P^3).
        return iter((self.matrix(0),))

    def _matrix(self, step: int) -> Matrix:
        half = self.period
        upper = [{(step + rank) % half + half} - {self.size} for rank in range(half)]
        return uniform(upper + [{(rank - step) % half} for rank in range(self.size - half)])


@dataclass(frozen=True)
class RandomMatching(Topology):
    """All ranks pair up at random, anew in every step; 1/2 each; with an odd number one idles.

    Ranks are sorted by the SHA-256 of seed, step and rank, and neighbours in that order pair up. The result does not
    depend on the version of a random generator.
    """

    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"expected seed to be an int, got {self.seed!r}")

    @property
    def period(self) -> None:
        """None: no two steps are related."""

    def rho(self) -> float:
        """Returns the square root of the second eigenvalue of E[W^T W], the expectation over all matchings.

        In every step the expected |X - 1 xbar|_F^2 therefore shrinks by at least rho^2 (Boyd et al., "Randomized Gossip
        Algorithms", 2006). rho^2 is (P - 2)/(2 (P - 1)) for an even number of ranks, and 1/2 for an odd one above 1.
        """
        # W is a projection, W^T W = W, so that E[W] is all it takes: 1/2 times the chance of a link where there is one.
        return math.sqrt(0.5 if self.size % 2 else (self.size - 2) / (2 * (self.size - 1))) if self.size > 1 else 0.0

    def _matrix(self, step: int) -> Matrix:
        order = sorted(range(self.size), key=lambda r: hashlib.sha256(f"{self.seed} {step} {r}".encode()).digest())
        pairs = {rank: set(order[k & ~1 : (k & ~1) + 2]) for k, rank in enumerate(order)}
        return uniform(pairs[rank] for rank in range(self.size))
