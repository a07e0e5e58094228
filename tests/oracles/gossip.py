"""The decentralized algorithms in NumPy, for all ranks at once, written from the papers.

Lian et al., D-PSGD, NeurIPS 2017; Tang et al., DCD-PSGD, NeurIPS 2018, and D2, ICML 2018; Koloskova et al., Choco-SGD, ICML
2019; Assran et al., stochastic gradient push, ICML 2019. In float64 a simulation is what the formulas say. In float32 each
operation is rounded, in the order that the pages of the algorithms document, so that results can be compared bit for bit.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]  # float32 or float64
F64 = npt.NDArray[np.float64]
Matrices = Callable[[int], F64]  # W of each round
# Of a rank, in a step, at some parameters; None of a step that is not taken.
Gradient = Callable[[int, int, Floats], Floats | None]
Through = Callable[[Floats, int, int], Floats]  # what a payload makes of a vector, for a rank, in a round


def whole(weights: F64) -> tuple[F64, int]:
    """Returns weights that are multiples of 1/d, for the smallest d up to 64, as whole numbers, and d; else the weights and 1."""
    d = next((d for d in range(1, 65) if np.abs(weights * d - np.rint(weights * d)).max() <= 1e-12 * d), None)
    return (weights, 1) if d is None else (np.rint(weights * d), d)


def mixed(w: F64, values: Floats) -> Floats:
    """Returns sum_j W[i, j] x_j for each rank i.

    Products are rounded, and added in ascending order of the ranks. Weights of a rank that are multiples of 1/d, for a d up
    to 64, count as whole numbers; the sum is divided by the smallest such d.
    """
    if values.dtype == np.float64:
        return np.asarray(w @ values)
    kind, rows = values.dtype.type, []
    for weights in w:
        factors, divisor = whole(weights)
        total = np.zeros_like(values[0])
        for rank in np.flatnonzero(factors):
            total = total + values[rank] * kind(factors[rank])
        rows.append(total / kind(divisor))
    return np.stack(rows)


@dataclass
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD` defines it.

    Attributes:
        lr: Learning rate of each step.
        momentum: Of the velocity, which each rank keeps for itself.
        weight_decay: Times the parameters from which the step starts, added to the gradient.
    """

    lr: Callable[[int], float]
    momentum: float = 0.0
    weight_decay: float = 0.0
    velocities: dict[int, Floats] = field(default_factory=dict)

    def __call__(self, rank: int, step: int, start: Floats, gradient: Floats) -> Floats:
        """Returns where a step ends that begins at `start`."""
        kind = start.dtype.type
        d = gradient + kind(self.weight_decay) * start if self.weight_decay else gradient
        if self.momentum:
            old = self.velocities.get(rank)
            d = d if old is None else kind(self.momentum) * old + d
            self.velocities[rank] = d
        return start - kind(self.lr(step)) * d


class Simulation(abc.ABC):
    """All ranks of an algorithm.

    Args:
        start: Parameters with which all ranks begin, or a row for each rank.
        matrices: W of each round; gives the number of ranks.
        gradient: As `Gradient`; a rank whose gradient is None takes no step and mixes what it has.
        update: The step of the optimizer.
        interval: Steps from one round to the next.
    """

    def __init__(
        self, start: Floats, matrices: Matrices, gradient: Gradient, update: SGD, *, interval: int = 1
    ) -> None:
        self.matrices, self.gradient, self.update, self.interval = matrices, gradient, update, interval
        self.ranks = len(matrices(0))
        self.x = np.array(start if start.ndim == 2 else np.tile(start, (self.ranks, 1)))
        self.steps = self.rounds = 0

    def step(self) -> Floats:
        """Takes one step; returns the parameters of all ranks after it."""
        gradients = [self.gradient(rank, self.steps, self.x[rank]) for rank in range(self.ranks)]
        self.advance(gradients, (self.steps + 1) % self.interval == 0)
        self.steps += 1
        return self.x.copy()

    def stepped(self, start: Floats, gradients: Sequence[Floats | None]) -> Floats:
        """Returns where the optimizers' steps end that begin at the rows of `start`."""
        rows = enumerate(zip(start, gradients, strict=True))
        return np.stack([x if g is None else self.update(rank, self.steps, x, g) for rank, (x, g) in rows])

    def advance(self, gradients: Sequence[Floats | None], meets: bool) -> None:
        """Takes the optimizers' steps, then the round if there is one."""
        self.x = self.stepped(self.x, gradients)
        if meets:
            self.round(self.matrices(self.rounds))
            self.rounds += 1

    @abc.abstractmethod
    def round(self, w: F64) -> None:
        """Exchanges what `self.x` has become in the step."""


class DPSGD(Simulation):
    """mix = sum_j W_ij x_j; x = mix - lr g_i(x_i): the gradient is that of before mixing."""

    def advance(self, gradients: Sequence[Floats | None], meets: bool) -> None:
        start = self.x
        if meets:
            start = mixed(self.matrices(self.rounds), self.x)
            self.rounds += 1
        self.x = self.stepped(start, gradients)

    def round(self, w: F64) -> None:
        raise NotImplementedError


class AdaptThenCombine(Simulation):
    """x = sum_j W_ij (x_j - lr g_j(x_j)): what other algorithms are under special conditions."""

    def round(self, w: F64) -> None:
        self.x = mixed(w, self.x)


class _Lossy(Simulation):
    """What is sent goes through a codec.

    Args:
        through: As `Through`.
    """

    def __init__(self, *args: Any, through: Through, **options: Any) -> None:
        super().__init__(*args, **options)
        self.through = through
        self.own = self.x.copy()

    def sent(self, values: Floats) -> Floats:
        """Returns what arrives of each rank's vector."""
        return np.stack([self.through(row, rank, self.rounds) for rank, row in enumerate(values)])


class DCD(_Lossy):
    """z = sum_j W_ij x_j - lr g_i(x_i); q = C(z - x_i); x_i += q, for which all neighbours hold the same bits."""

    def round(self, w: F64) -> None:
        # The optimizer has made x_i - lr g_i of x_i, which is what all others hold.
        q = self.sent((mixed(w, self.own) + self.x) - self.x.dtype.type(2) * self.own)
        self.own = self.own + q
        self.x = self.own.copy()


class Choco(_Lossy):
    """h = x_i - lr g_i; q = C(h - xhat_i); xhat_i += q; s_i += sum_j W_ij q_j; x_i = h + eta (s_i - xhat_i).

    The difference s_i - xhat_i is kept instead of s_i.

    Args:
        eta: Step size of the consensus.
    """

    def __init__(self, *args: Any, eta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eta = self.x.dtype.type(eta)
        # sum_j W_ij (xhat_j - xhat_i), which is zero if all ranks start alike.
        alike = bool((self.own == self.own[0]).all())
        self.gap = np.zeros_like(self.x) if alike else mixed(self.matrices(0), self.own) - self.own

    def round(self, w: F64) -> None:
        q = self.sent(self.x - self.own)
        self.own = self.own + q
        kind = self.x.dtype.type
        for rank, weights in enumerate(w):
            # What a rank sent has weights that sum to zero over all ranks.
            factors, divisor = whole(weights)
            factors = factors - divisor * np.eye(len(w))[rank]
            change = np.zeros_like(q[rank])
            for other in np.flatnonzero(factors):
                change = change + q[other] * kind(factors[other])
            self.gap[rank] = self.gap[rank] + change * kind(1 / divisor)
        self.x = self.x + self.eta * self.gap


class D2(Simulation):
    """half = 2 x_k - x_{k-1} - lr_k g_k + lr_{k-1} g_{k-1}; x_{k+1} = sum_j W_ij half_j.

    With x+ the end of the optimizer's step and c the last x+ - x, half is x+ - c, for any optimizer.

    Args:
        flows: Whether c changes by sum_j W_ij (half_j - half_i) instead. What flows from i to j is then exactly what flows
            from j to i, so that rounding leaves the sum of all c at zero.
    """

    def __init__(self, *args: Any, flows: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.flows = flows
        self.correction = np.zeros_like(self.x)

    def round(self, w: F64) -> None:
        after, half = self.x, self.x - self.correction
        if self.flows:
            for rank, row in enumerate(half):
                factors, divisor = whole(w[rank])
                flow = np.zeros_like(row)
                for other in np.flatnonzero(factors):
                    if other != rank:
                        flow = flow + row.dtype.type(factors[other]) * (half[other] - row)
                self.correction[rank] = self.correction[rank] - flow / row.dtype.type(divisor)
            self.x = after - self.correction
        else:
            self.x = mixed(w, half)
            self.correction = after - self.x


class PushSum(Simulation):
    """n_i -= lr g_i(n_i / w_i); n_i = sum_j W_ij n_j; w_i = sum_j W_ij w_j; columns of W sum to 1, and x_i = n_i / w_i."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.numerator = self.x.copy()
        self.weights = np.ones((self.ranks, 1))  # float64, whatever the parameters are

    def round(self, w: F64) -> None:
        # Steps since the last round have moved the parameters from n / w by the gradients.
        numerator = self.numerator + (self.x - self.numerator / self.weights.astype(self.x.dtype))
        self.numerator, self.weights = mixed(w, numerator), mixed(w, self.weights)
        self.x = self.numerator / self.weights.astype(self.x.dtype)


def exact(values: Floats, rank: int, round_: int) -> Floats:
    """Returns what a codec without loss makes of a vector."""
    return values


def distance(x: Floats) -> float:
    """Returns the sum over ranks of their squared distance from the mean."""
    wide = x.astype(np.float64)
    return float(np.square(wide - wide.mean(axis=0)).sum())


def slope(distances: Sequence[float], burn_in: int = 0) -> float:
    """Returns by how much the logarithm of a distance changes in a step, fitted with least squares from a step on."""
    logarithms = np.log(np.asarray(distances[burn_in:], np.float64))
    steps = np.arange(len(logarithms), dtype=np.float64)
    steps -= steps.mean()
    return float(steps @ (logarithms - logarithms.mean()) / (steps @ steps))


def expected_slope(matrices: Sequence[F64]) -> float:
    """Returns what `slope` tends to: 2 log |lambda| per step, of the eigenvalue of a period that is second in magnitude."""
    product = np.eye(len(matrices[0]))
    for w in matrices:
        product = w @ product
    second = sorted(np.abs(np.linalg.eigvals(product)))[-2]
    return 2 * math.log(second) / len(matrices) if second > 1e-12 else -math.inf


def column_stochastic(size: int, out: Sequence[Sequence[int]]) -> F64:
    """Returns the W of ranks that each divide what they have equally among some others and themselves.

    Args:
        size: The number of ranks.
        out: For each rank those to which it sends.
    """
    w = np.zeros((size, size))
    for rank, others in enumerate(out):
        w[[rank, *others], rank] = 1 / (1 + len(others))
    return w


def lazy(w: F64) -> F64:
    """Returns (I + W) / 2, whose eigenvalues are not negative."""
    return (np.eye(len(w)) + w) / 2


def hierarchical(w: F64, nodes: Sequence[Sequence[int]]) -> F64:
    """Returns the W of ranks that take the mean of their node before it is mixed, from the W of the nodes."""
    ranks = sum(map(len, nodes))
    found = np.zeros((ranks, ranks))
    for row, inside in zip(w, nodes, strict=True):
        for weight, others in zip(row, nodes, strict=True):
            found[np.ix_(inside, others)] = weight / len(others)
    return found
