"""Who talks to whom, and with what weight: rank i replaces its x_i by sum_j W[i, j] x_j, W the mixing matrix."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from bagua_kernels.comm.communicator import Communicator

Matrix = npt.NDArray[np.float64]
Needs = Literal["rows", "columns", "doubly", "symmetric"]

TOLERANCE = 1e-12  # by how much a sum of weights may differ from 1, and a weight from its mirror image
_APERIODIC_WINDOW = 16  # steps that stand for a schedule that never repeats
_EXCERPT = 240  # characters of a topology's text in an error


@dataclass(frozen=True)
class Topology(abc.ABC):
    """A mixing matrix for every step, over `size` ranks (P below); equal topologies compare and hash equal.

    A subclass, a frozen dataclass, implements `_matrix`, the same bits on every rank, and `period` unless it is static.
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"expected size to be a number of ranks, an int >= 1, got {self.size!r}")

    @property
    def period(self) -> int | None:
        """Steps after which the matrices repeat: 1 if there is one matrix only, None if they never repeat."""
        return 1

    @property
    def window(self) -> int:
        """Steps that facts are verified over: a period, or the first 16 of a schedule that never repeats."""
        return self.period or _APERIODIC_WINDOW

    def matrix(self, step: int = 0) -> Matrix:
        """Returns W of a step from 0: float64, (P, P), read-only, since it is shared."""
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"expected step to be an int >= 0, got {step!r}")
        return _cached_matrix(self, step % self.period if self.period else step)

    def neighbours_in(self, rank: int, step: int = 0) -> tuple[int, ...]:
        """Returns the other ranks that `rank` hears from, in ascending order."""
        return self._others(rank, self.matrix(step))

    def neighbours_out(self, rank: int, step: int = 0) -> tuple[int, ...]:
        """Returns the other ranks that `rank` sends to, in ascending order."""
        return self._others(rank, self.matrix(step).T)

    def weights(self, rank: int, step: int = 0) -> dict[int, float]:
        """Returns what `rank` takes from whom, in ascending order: `neighbours_in` and, even if 0, itself."""
        w = self.matrix(step)
        return {peer: float(w[rank, peer]) for peer in sorted((rank, *self._others(rank, w)))}

    @property
    def doubly_stochastic(self) -> bool:
        """True if weights are >= 0 and rows and columns sum to 1, so that the mean of all ranks stays as it is."""
        return not self._unbalanced("rows") and not self._unbalanced("columns")

    @property
    def symmetric(self) -> bool:
        """True if every matrix equals its transpose."""
        return all(np.allclose(w, w.T, rtol=0, atol=TOLERANCE) for w in self._matrices())

    @property
    def mixes(self) -> bool:
        """True if some power of the window's product has no zero; swapping values, ranks hear of others and never agree."""
        reach = functools.reduce(lambda before, w: w @ before, self._matrices(), np.eye(self.size)) != 0
        for _ in range(2 * self.size.bit_length()):  # (P - 1)^2 + 1 factors suffice (Wielandt, 1950)
            reach = reach.astype(np.float32) @ reach > 0
        return bool(reach.all())

    def rho(self) -> float:
        """Returns by what factor a period shrinks the distance from the mean, at worst.

        That is the largest singular value of M - 11^T/P, where M = W[T-1] ... W[0] is the product over a period of T
        steps. If M is doubly stochastic, |M X - 1 xbar|_F <= rho |X - 1 xbar|_F for all X, with equality for some. For a
        symmetric M it is the second largest absolute eigenvalue. 0 means that a period yields the exact mean.
        """
        product = functools.reduce(lambda before, w: w @ before, self._matrices(), np.eye(self.size))
        return float(np.linalg.norm(product - 1 / self.size, 2))

    def spectral_gap(self) -> float:
        """Returns 1 - rho."""
        return 1 - self.rho()

    def digest(self) -> str:
        """Returns the SHA-256 of the topology's text and of the matrices of its window, in hexadecimal."""
        state = hashlib.sha256(repr(self).encode())
        for w in self._matrices():
            # Positions and values of the weights are equivalent to the matrix, which is mostly zeros.
            state.update(np.flatnonzero(w).astype("<i8").tobytes())
            state.update(w[w != 0].astype("<f8").tobytes())
        return state.hexdigest()

    def check(self, communicator: Communicator, needs: Needs = "doubly") -> None:
        """Verifies that all ranks hold this topology and that it is sound; every rank calls it, before training.

        Args:
            communicator: whose ranks will use the topology.
            needs: what sums to 1: "rows", "columns" (push-sum), "doubly" both, "symmetric" both with W equal to W^T.

        Raises:
            ValueError: on every rank, if topologies differ between ranks, the size is not the communicator's, weights are
                invalid, or repeated steps never mix all ranks.
        """
        found = communicator.all_gather_object((self.digest(), self._faults(communicator.size, needs)))
        different = [rank for rank, (digest, _) in enumerate(found) if digest != found[0][0]]
        if different:
            texts = communicator.all_gather_object(repr(self))  # long for a given matrix, and so sent only now
            lines = [f"rank 0 holds {_excerpt(texts[0], texts[different[0]])}, SHA-256 {found[0][0][:12]}"]
            lines += [f"rank {r} holds {_excerpt(texts[r], texts[0])}, SHA-256 {found[r][0][:12]}" for r in different]
            lines.insert(0, f"ranks {different} hold other topologies than rank 0: pass the same to every rank")
            raise ValueError("\n".join(lines))
        if faults := next((faults for _, faults in found if faults), None):
            raise ValueError(f"{_excerpt(repr(self))} cannot be used: {'; '.join(faults)}")

    def describe(self) -> str:
        """Returns a report of several lines: name, size, degrees, facts, rho and the first four matrices."""
        links = [(w != 0) & ~np.eye(self.size, dtype=np.bool_) for w in self._matrices()]
        heard, told = (max(int(link.sum(axis).max()) for link in links) for axis in (1, 0))
        lines = [
            f"{type(self).__name__}: {self.size} ranks, period {self.period}, at most {heard} in and {told} out",
            f"symmetric {self.symmetric}, doubly stochastic {self.doubly_stochastic}, mixes {self.mixes}",
            f"rho {self.rho():.6f}, spectral gap {self.spectral_gap():.6f}",
        ]
        for step in range(min(4, self.window)):
            lines += [f"step {step}", np.array2string(self.matrix(step), precision=4, suppress_small=True)]
        return "\n".join(lines)

    @abc.abstractmethod
    def _matrix(self, step: int) -> Matrix:
        """Returns a new matrix for a step, which is below `period` if there is one."""

    def _matrices(self) -> Iterator[Matrix]:
        return (self.matrix(step) for step in range(self.window))

    def _others(self, rank: int, w: Matrix) -> tuple[int, ...]:
        if not 0 <= rank < self.size:
            raise ValueError(f"expected rank to be from 0 to {self.size - 1}, got {rank}")
        return tuple(peer for peer in np.flatnonzero(w[rank]).tolist() if peer != rank)

    def _faults(self, size: int, needs: Needs) -> list[str]:
        faults: list[str] = []
        if needs not in get_args(Needs):
            faults.append(f"{needs=} is expected to be one of {get_args(Needs)}")
        if self.size != size:
            faults.append(f"it is for {self.size} ranks, and the communicator has {size}: make one for {size}")
        sums = (needs,) if needs in ("rows", "columns") else ("rows", "columns")
        faults += [fault for fault in map(self._unbalanced, sums) if fault]
        if needs == "symmetric" and not self.symmetric:
            faults.append("its matrix is not symmetric: use an undirected graph")
        if not self.mixes:
            why = "some ranks never hear from others, or values go round for ever: add links or self-weights"
            faults.append(f"its {self.window} steps, repeated, never mix all ranks: {why}")
        return faults

    def _unbalanced(self, kind: str) -> str:
        for step, w in enumerate(self._matrices()):
            sums = w.sum(axis=1 if kind == "rows" else 0)
            worst = int(np.abs(sums - 1).argmax())
            if (w < 0).any() or not abs(sums[worst] - 1) <= TOLERANCE:
                return (
                    f"in step {step} its {kind} are expected to be weights >= 0 that sum to 1, got the sum "
                    f"{float(sums[worst])!r} for rank {worst} and the least weight {float(w.min())!r}: scale them"
                )
        return ""


def uniform(senders: Iterable[set[int]]) -> Matrix:
    """Gives each rank the plain mean of its own value and those of its senders."""
    rows = [sorted(peers | {rank}) for rank, peers in enumerate(senders)]
    w = np.zeros((len(rows), len(rows)))
    for rank, peers in enumerate(rows):
        w[rank, peers] = 1 / len(peers)
    return w


@functools.lru_cache(maxsize=16)
def _cached_matrix(topology: Topology, step: int) -> Matrix:
    w = topology._matrix(step)
    w.setflags(write=False)
    return w


def _excerpt(text: str, other: str = "") -> str:
    """Shortens `text` to the surroundings of its first difference from `other`."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 0)
    start = max(0, same - _EXCERPT // 2)
    return text if len(text) <= _EXCERPT else f"{'…' * (start > 0)}{text[start : start + _EXCERPT]}…"
