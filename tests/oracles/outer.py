"""Training with local steps in NumPy float64, for all ranks at once, written from the formulas of the papers.

Stich, local SGD, ICLR 2019; Lin et al., post-local SGD, ICLR 2020; Wang et al., SlowMo, ICLR 2020; Douillard et al.,
DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; SparseLoCo, arXiv 2508.15706.

Each rank takes inner steps from its own parameters theta. All ranks have the same outer parameters phi. A round ends
with an inner step; its pseudo-gradients are phi - theta. Outer rules treat their mean as a gradient: they subtract it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.oracles.gossip import F64, SGD, Gradient

Indices = npt.NDArray[np.intp]
Inner = Callable[[int, int, F64], F64]  # where the step of a rank ends, from the rank, the step and the parameters
Meets = Callable[[int], bool]  # True if a round ends with this step; the first step is 0
Select = Callable[[F64], tuple[Indices, F64]]  # the elements that a rank sends of a vector, and the values that arrive
LearningRate = Callable[[int], float | F64]  # of a step; an array holds one learning rate per element
# New phi and new momentum, from phi, the mean pseudo-gradient, the momentum, and the last step of the round.
Outer = Callable[[F64, F64, F64, int], tuple[F64, F64]]


def inner(gradient: Gradient, update: SGD) -> Inner:
    """Returns the inner step of an optimizer. A gradient that is None leaves the parameters as they are."""

    def taken(rank: int, step: int, start: F64) -> F64:
        found = gradient(rank, step, start)
        return start if found is None else update(rank, step, start, found)

    return taken


def every(interval: int) -> Meets:
    """Returns the schedule of rounds that end with steps interval - 1, 2 interval - 1, and so on."""
    return lambda step: (step + 1) % interval == 0


def after_first_phase(first_phase: int, interval: int) -> Meets:
    """Returns the schedule of a round after each of the first steps, then of rounds of `interval` steps.

    The long rounds are counted from the end of the first phase: with (3, 4), rounds end with steps 0, 1, 2, 6, 10, ...
    """
    return lambda step: step < first_phase or (step + 1 - first_phase) % interval == 0


@dataclass(frozen=True)
class Average:
    """phi -= D, which makes phi the mean of theta. There is no momentum."""

    def __call__(self, phi: F64, d: F64, momentum: F64, step: int) -> tuple[F64, F64]:
        return phi - d, momentum


@dataclass(frozen=True)
class Nesterov:
    """m = mu m + D; phi -= lr (D + mu m), as `torch.optim.SGD` defines it.

    Attributes:
        lr: Outer learning rate.
        momentum: Outer momentum mu. With 0 there is none: phi -= lr D, and m stays zero.
    """

    lr: float
    momentum: float = 0.0

    def __call__(self, phi: F64, d: F64, momentum: F64, step: int) -> tuple[F64, F64]:
        if self.momentum == 0:
            return phi - self.lr * d, momentum
        momentum = self.momentum * momentum + d
        return phi - self.lr * (d + self.momentum * momentum), momentum


@dataclass(frozen=True)
class SlowMomentum:
    """u = beta u + D / gamma; phi -= alpha gamma u.

    Attributes:
        lr: Inner learning rate gamma. A round uses that of its last step, which must not be zero.
        slow_lr: alpha.
        slow_momentum: beta.
    """

    lr: LearningRate
    slow_lr: float
    slow_momentum: float

    def __call__(self, phi: F64, d: F64, momentum: F64, step: int) -> tuple[F64, F64]:
        gamma = self.lr(step)
        momentum = self.slow_momentum * momentum + d / gamma
        return phi - self.slow_lr * gamma * momentum, momentum


@dataclass
class Dense:
    """Two passes with error feedback: e += D; v = Q(e); e -= v on each rank. Then f += mean v; d = Q(f); f -= d, once for all.

    Attributes:
        elements: Indices of the elements that are sent like this.
        quantize: Q, of these elements.
        owed: f, which the owners of chunks keep; 0 at first.
    """

    elements: Indices
    quantize: Callable[[F64], F64]
    owed: F64 | float = 0.0

    def __call__(self, d: F64, residuals: F64) -> tuple[F64, F64]:
        """Returns the combined pseudo-gradient and the new residuals, from one row per rank of each."""
        e = residuals + d
        sent = np.stack([self.quantize(row) for row in e])
        f = self.owed + sent.sum(axis=0) / len(sent)
        combined = self.quantize(f)
        self.owed = f - combined
        return combined, e - sent


@dataclass(frozen=True)
class Payload:
    """e = beta e + D; S, v = select(e); e[S] -= v on each rank; then all values that ranks sent are combined.

    Attributes:
        select: As `Select`. No element may be selected twice, nor one that is dense.
        beta: Decay of the residual e; 0 forgets what was not sent.
        reduce: "mean" divides the sum of an element's values by the number of ranks, "contributors" by the number of
            ranks that sent this element. An element that no rank sent is 0. A rank that sent the value 0 counts.
        dense: As `Dense`, for the elements that it has; None if there are none.
    """

    select: Select
    beta: float
    reduce: Literal["mean", "contributors"]
    dense: Dense | None = None

    def __call__(self, d: F64, residuals: F64) -> tuple[F64, F64]:
        """Returns the combined pseudo-gradient and the new residuals, from one row per rank of each."""
        e = self.beta * residuals + d
        total, senders = np.zeros(e.shape[1]), np.zeros(e.shape[1])
        for row in e:
            indices, values = self.select(row.copy())
            assert len(np.unique(indices)) == len(indices) == len(values)
            row[indices] -= values
            total[indices] += values
            senders[indices] += 1
        combined = total / (len(e) if self.reduce == "mean" else np.maximum(senders, 1))
        if self.dense is not None:
            at = self.dense.elements
            assert not senders[at].any()
            combined[at], e[:, at] = self.dense(d[:, at], residuals[:, at])
        return combined, e


@dataclass(frozen=True)
class Exchange:
    """A round that has been sent and not yet merged.

    Attributes:
        elements: Indices of the elements that the round exchanges.
        sent: theta of these elements on each rank when the round was sent.
        d: The combined pseudo-gradient.
        step: The last step of the round.
        due: The step before whose forward pass the round is merged.
    """

    elements: Indices
    sent: F64
    d: F64
    step: int
    due: int


@dataclass(frozen=True)
class Result:
    """What a simulation has come to.

    Attributes:
        trajectory: theta of all ranks before each step and after the last one, shape (steps + 1, ranks, n). Row k
            contains all merges that are due before the forward pass of step k.
        phi: The outer parameters, shape (n,). A round in flight has not changed them.
        momentum: The momentum of the outer rule, shape (n,). Each fragment has its own elements.
        residuals: Of each rank, shape (ranks, n); zeros without a payload.
    """

    trajectory: F64
    phi: F64
    momentum: F64
    residuals: F64


class Simulation:
    """All ranks of an algorithm with local steps.

    Args:
        start: Parameters with which all ranks begin, or a row for each rank. The first phi is the row of rank 0.
        inner: As `Inner`. Each call is a step and counts.
        outer: As `Outer`.
        ranks: Number of ranks.
        meets: As `Meets`.
        delay: Steps that ranks take between sending a round and merging it. Fewer than from one round to the next.
        blend: None merges by theta = phi + (theta - theta when sent), which keeps the steps since then; for delay 0,
            this is theta = phi. A number a merges by theta = a theta + (1 - a) phi.
        fragments: Indices of each fragment's elements. Round t (t = 0, 1, ...) exchanges fragment t mod F. None is one
            fragment of all elements.
        payload: What ranks send; None sends exact pseudo-gradients and takes their mean.
    """

    def __init__(
        self,
        start: F64,
        inner: Inner,
        outer: Outer,
        *,
        ranks: int,
        meets: Meets,
        delay: int = 0,
        blend: float | None = None,
        fragments: Sequence[Indices] | None = None,
        payload: Payload | None = None,
    ) -> None:
        self.x = np.array(np.broadcast_to(start, (ranks, start.shape[-1])), np.float64)
        self.inner, self.outer, self.meets, self.delay, self.blend = inner, outer, meets, delay, blend
        everything = np.arange(self.x.shape[1])
        self.fragments = [everything] if fragments is None else list(fragments)
        if not np.array_equal(np.sort(np.concatenate(self.fragments)), everything):
            raise ValueError("each element belongs to exactly one fragment")
        self.payload = payload
        self.phi = self.x[0].copy()
        self.momentum = np.zeros_like(self.phi)
        self.residuals = np.zeros_like(self.x)
        self.in_flight: Exchange | None = None
        self.steps = self.rounds = 0

    def run(self, steps: int) -> Result:
        """Takes some steps; returns what all ranks have come to. The trajectory begins where the last run ended."""
        trajectory = np.stack([self.x.copy(), *(self.step() for _ in range(steps))])
        return Result(trajectory, self.phi.copy(), self.momentum.copy(), self.residuals.copy())

    def step(self) -> F64:
        """Takes one step; returns the parameters of all ranks after the merge that is due before the next one."""
        self.x = np.stack([self.inner(rank, self.steps, row.copy()) for rank, row in enumerate(self.x)])
        if self.meets(self.steps):
            self.send()
        self.steps += 1
        if self.in_flight is not None and self.in_flight.due == self.steps:
            self.merge()
        return self.x.copy()

    def send(self) -> None:
        """Ends a round: takes the pseudo-gradients of its fragment."""
        if self.in_flight is not None:
            raise ValueError(f"step {self.steps} ends a round before the last one was merged; delay is {self.delay}")
        elements = self.fragments[self.rounds % len(self.fragments)]
        sent = self.x[:, elements]
        d = self.phi[elements] - sent
        if self.payload is None:
            combined = d.sum(axis=0) / len(d)
        else:
            combined, self.residuals[:, elements] = self.payload(d, self.residuals[:, elements])
        self.in_flight = Exchange(elements, sent, combined, self.steps, self.steps + 1 + self.delay)
        self.rounds += 1

    def merge(self) -> None:
        """Merges the round in flight, if there is one, due or not."""
        if self.in_flight is None:
            return
        exchange, self.in_flight = self.in_flight, None
        elements = exchange.elements
        phi, momentum = self.outer(self.phi[elements], exchange.d, self.momentum[elements], exchange.step)
        self.phi[elements], self.momentum[elements] = phi, momentum
        theta = self.x[:, elements]
        if self.blend is None:
            self.x[:, elements] = phi + (theta - exchange.sent)
        else:
            self.x[:, elements] = self.blend * theta + (1 - self.blend) * phi


def local_sgd(
    start: F64, inner: Inner, *, ranks: int, interval: int, delay: int = 0, blend: float | None = None
) -> Simulation:
    """Returns the simulation of `Average` each `interval` steps."""
    return Simulation(start, inner, Average(), ranks=ranks, meets=every(interval), delay=delay, blend=blend)


def post_local_sgd(
    start: F64, inner: Inner, *, ranks: int, first_phase: int, interval: int, blend: float | None = None
) -> Simulation:
    """Returns the simulation of `Average` after each of the first steps, then each `interval` steps."""
    meets = after_first_phase(first_phase, interval)
    return Simulation(start, inner, Average(), ranks=ranks, meets=meets, blend=blend)


def slow_mo(
    start: F64,
    inner: Inner,
    *,
    ranks: int,
    interval: int,
    lr: LearningRate,
    slow_lr: float,
    slow_momentum: float,
    delay: int = 0,
    blend: float | None = None,
) -> Simulation:
    """Returns the simulation of `SlowMomentum`; `lr` is the learning rate of the inner steps."""
    outer = SlowMomentum(lr, slow_lr, slow_momentum)
    return Simulation(start, inner, outer, ranks=ranks, meets=every(interval), delay=delay, blend=blend)


def diloco(
    start: F64,
    inner: Inner,
    *,
    ranks: int,
    interval: int,
    outer_lr: float,
    outer_momentum: float,
    delay: int = 0,
    blend: float | None = None,
    fragments: Sequence[Indices] | None = None,
    payload: Payload | None = None,
) -> Simulation:
    """Returns the simulation of `Nesterov`; with fragments, each of them is exchanged once in `interval` steps."""
    count = 1 if fragments is None else len(fragments)
    if interval % count:
        raise ValueError(f"{count} fragments do not divide an interval of {interval} steps")
    return Simulation(
        start,
        inner,
        Nesterov(outer_lr, outer_momentum),
        ranks=ranks,
        meets=every(interval // count),
        delay=delay,
        blend=blend,
        fragments=fragments,
        payload=payload,
    )


def sparse_loco(
    start: F64,
    inner: Inner,
    *,
    ranks: int,
    interval: int,
    alpha: float,
    beta: float,
    select: Select,
    reduce: Literal["mean", "contributors"] = "contributors",
    dense: Dense | None = None,
    delay: int = 0,
    blend: float | None = None,
) -> Simulation:
    """Returns the simulation of phi -= alpha Dbar, with Dbar and the residuals of `Payload`."""
    return Simulation(
        start,
        inner,
        Nesterov(alpha),
        ranks=ranks,
        meets=every(interval),
        delay=delay,
        blend=blend,
        payload=Payload(select, beta, reduce, dense),
    )
