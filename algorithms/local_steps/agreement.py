"""How far ranks agree on where to go, by which an outer loop chooses its step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagua_kernels.comm import Communicator, Work

# Of the rule in `Agreement`, found by `bench.short_runs`.
_FAR = 16.0
_LEAST = 0.25  # of the number of ranks, as far as outer parameters go at least
_SLOW = 50.0  # rounds, over the number of ranks: how slowly momentum may rise
_MOST_RANKS = 8  # that count: the study has no more
_MOST = 0.8
_FARTHEST = 2.0  # of SlowMo, whose momentum does not look ahead: it overshoots where outer parameters go further
_SURELY = 3.0  # times as far in the end: from there on, outer parameters go as far as plain means at once
_RATES, _SHARES = (0.7, 1.0), (0.6, 0.85)
_ROW = 4096  # elements whose norm is found in float32
# Where no rank can be compared with another: of one rank alone, and with a quorum.
ALONE = (0.7, 0.5)


class Agreement:
    """The share of the mean pseudo-gradient on which ranks agree, and the outer step that suits it.

    Let the ranks' pseudo-gradients be d_i = s + n_i, with noise that is each rank's own. Then |mean d|^2 has |s|^2 and 1 / P of
    the noise, and the mean of |d_i|^2 has |s|^2 and all of it. For round t, counted from 1, with what round t - 1 has shown:

    1. share = |s|^2 / |mean d|^2 = (P |mean d|^2 - mean |d_i|^2) / ((P - 1) |mean d|^2), from 0 to 1; in the first round 0.
    2. rate = 0.7 up to a share of 0.6, 1 from 0.85 on, and linear in between.
    3. far = max(16 share^2, P / 4, rate): so many times as far as a mean pseudo-gradient outer parameters go in the end.
    4. bound = (t - 1) / (t + 50 / P).
    5. lr = max(rate, min(1, far / 3) (1 - bound)).
    6. momentum = min(1 - lr / far, bound, 0.8), and at least 0.

    More than 8 ranks count as 8. Their number stands for the learning rate, which suits the samples of one rank, and would be
    larger for those of all.

    `SlowMo` keeps its learning rate, and has slow_momentum = 1 - slow_lr / min(far, 0.7 / (1 - bound), 2), and at least 0.

    Pseudo-gradients of few ranks, of small batches, or of weights that are trained already are mostly noise, which momentum would
    add up. In the first rounds it would add up steps of a learning rate that still rises. As long as the bound keeps it small,
    ranks that agree on much have a larger learning rate. So outer parameters go as far as with plain means.

    All ranks have the same numbers: they gather two sums of squares in each round, before the exchange of its first bucket.

    Attributes:
        rounds: that have begun.
        share: of the last round that all ranks have finished; 0 before.
        first: the index of the bucket with which a round begins.
    """

    def __init__(self, communicator: Communicator, first: int) -> None:
        """Begins before the first round.

        Args:
            communicator: of the exchanges.
            first: the index of the bucket that is exchanged first.
        """
        self._communicator, self.first = communicator, first
        self.rounds, self.share = 0, 0.0
        # Of the last round: the squares of this rank's pseudo-gradient and of the mean. None before, and where ranks are others.
        self._squares: torch.Tensor | None = None

    def begin(self, index: int) -> Iterator[Work]:
        """Begins a round with its first bucket: gathers what all ranks have found in the last one."""
        if index != self.first:
            return
        if self._communicator.size > 1:
            yield from self._gather()
        else:
            self.rounds += 1
        self._squares = torch.zeros(2, dtype=torch.float64, device=self._communicator.device)

    def _gather(self) -> Iterator[Work]:
        size, device = self._communicator.size, self._communicator.device
        numbers = [float(self._squares is not None), float(self.rounds), self.share, 0.0, 0.0]
        # waits: once a round.
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        if self._squares is not None:
            own[3:] = self._squares
        everyone = own.new_empty((size, own.numel()))
        yield self._communicator.all_gather(everyone, own)
        # waits: once a round: the host chooses the momentum.
        rows = everyone.tolist()
        # Where members have changed, those that have begun the most rounds know best.
        _, rounds, share, _, _ = max(rows, key=lambda row: row[1])
        if all(row[0] for row in rows):
            single, mean = (math.fsum(row[place] for row in rows) / size for place in (3, 4))
            share = (size * mean - single) / ((size - 1) * mean) if 0 < mean < math.inf else 0.0
        self.rounds, self.share = int(rounds) + 1, min(max(share, 0.0), 1.0)

    def sent(self, difference: torch.Tensor) -> None:
        """Adds the square of this rank's pseudo-gradient of a bucket; in the order in which buckets are exchanged."""
        self._add(0, difference)

    def received(self, mean: torch.Tensor) -> None:
        """Adds the square of the mean of all ranks."""
        self._add(1, mean)

    def _add(self, place: int, vector: torch.Tensor) -> None:
        if self._communicator.size > 1:
            assert self._squares is not None
            self._squares[place] += _square(vector)

    def outer_lr(self) -> float:
        """Returns the learning rate of this round: step 5."""
        size = self._communicator.size
        return ALONE[0] if size == 1 else lr_after(self.rounds, self.share, size)

    def momentum(self, lr: float) -> float:
        """Returns the momentum of this round: step 6.

        Args:
            lr: the outer learning rate: without momentum outer parameters go so many times as far as a pseudo-gradient.
        """
        if self._communicator.size == 1:
            return min(ALONE[1], _rising(self.rounds, 1))
        return momentum_after(self.rounds, self.share, lr, self._communicator.size)

    def slow_momentum(self, slow_lr: float) -> float:
        """Returns the momentum of this round for `SlowMo`.

        Args:
            slow_lr: the slow learning rate.
        """
        size = self._communicator.size
        if size == 1:
            return max(0.0, 1 - slow_lr * (1 - self.momentum(ALONE[0])) / ALONE[0])
        return slow_momentum_after(self.rounds, self.share, slow_lr, size)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        # waits: for a checkpoint.
        squares = {} if self._squares is None else {"squares": self._squares.tolist()}
        return {"rounds": self.rounds, "share": self.share, **squares}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned; without squares where ranks have become others since."""
        self.rounds, self.share = int(numbers.get("rounds", 0)), float(numbers.get("share", 0.0))
        self._squares = None
        if (squares := numbers.get("squares")) is not None:
            # waits: for a checkpoint.
            self._squares = torch.tensor(squares, dtype=torch.float64, device=self._communicator.device)


def _square(vector: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares, in float64; of rows, whose norms take less memory than a vector in float64 would."""
    whole = vector.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    found: torch.Tensor = rows.double().square().sum() + rest.double().square()
    return found


def lr_after(rounds: int, share: float, ranks: int) -> float:
    """Returns the outer learning rate of a round.

    Args:
        rounds: that have begun, with this one.
        share: on which ranks have agreed in the last one.
        ranks: that take part.
    """
    return max(_rate(share), min(1.0, _far(share, ranks) / _SURELY) * (1 - _rising(rounds, ranks)))


def momentum_after(rounds: int, share: float, lr: float, ranks: int) -> float:
    """Returns the momentum of a round.

    Args:
        rounds: that have begun, with this one.
        share: on which ranks have agreed in the last one.
        lr: the outer learning rate.
        ranks: that take part.
    """
    return max(0.0, min(1 - lr / _far(share, ranks), _rising(rounds, ranks), _MOST))


def slow_momentum_after(rounds: int, share: float, slow_lr: float, ranks: int) -> float:
    """Returns the momentum of a round for `SlowMo`.

    Args:
        rounds: that have begun, with this one.
        share: on which ranks have agreed in the last one.
        slow_lr: the slow learning rate.
        ranks: that take part.
    """
    far = min(_far(share, ranks), _RATES[0] / (1 - _rising(rounds, ranks)), _FARTHEST)
    return max(0.0, 1 - slow_lr / far)


def _rate(share: float) -> float:
    place = (share - _SHARES[0]) / (_SHARES[1] - _SHARES[0])
    return _RATES[0] + (_RATES[1] - _RATES[0]) * min(max(place, 0.0), 1.0)


def _far(share: float, ranks: int) -> float:
    return max(_FAR * share * share, _LEAST * min(ranks, _MOST_RANKS), _rate(share))


def _rising(rounds: int, ranks: int) -> float:
    return max(rounds - 1, 0) / (rounds + _SLOW / min(ranks, _MOST_RANKS))
