"""How far ranks agree on where to go, by which an outer loop chooses its step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagua_kernels.comm import Communicator, Work

# Of the rule in `Agreement`, found by `bench.short_runs`.
_FAR = 16.0
_SLOW = 18  # rounds: how slowly momentum may rise
_MOST = 0.8
_RATES, _SHARES = (0.7, 1.0), (0.6, 0.85)
# Where no rank can be compared with another: of one rank alone, and with a quorum.
ALONE = (0.7, 0.5)


class Agreement:
    """The share of the mean pseudo-gradient on which ranks agree, and the outer step that suits it.

    Let the ranks' pseudo-gradients be d_i = s + n_i, with noise that is each rank's own. Then |mean d|^2 has |s|^2 and 1 / P of
    the noise, and the mean of |d_i|^2 has |s|^2 and all of it. For round t, counted from 1, with what round t - 1 has shown:

    1. share = |s|^2 / |mean d|^2 = (P |mean d|^2 - mean |d_i|^2) / ((P - 1) |mean d|^2), from 0 to 1; in the first round 0.
    2. lr = 0.7 up to a share of 0.6, 1 from 0.85 on, and linear in between.
    3. far = 16 share^2, at least lr: so many times as far as a mean pseudo-gradient outer parameters are to go in the end.
    4. momentum = 1 - lr / far, with which they do, and at most (t - 1) / (t + 18), and 0.8.

    Pseudo-gradients of few ranks, of small batches, or of weights that are trained already are mostly noise, which momentum would
    add up. In the first rounds it would add up steps of a learning rate that still rises.

    All ranks have the same numbers: they gather two sums of squares in each round, before the exchange of its first bucket.

    Attributes:
        rounds: that have begun.
        share: of the last round that all ranks have finished; 0 before.
        first: the index of the bucket with which a round begins; None without buckets.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Begins before the first round.

        Args:
            communicator: of the exchanges.
        """
        self._communicator = communicator
        self.rounds, self.share = 0, 0.0
        self.first: int | None = None
        self._own: dict[int, torch.Tensor] = {}
        self._means: dict[int, torch.Tensor] = {}
        self._is_whole = False

    def add(self, index: int) -> None:
        """Adds a bucket; the first one begins each round."""
        self.first = index if self.first is None else self.first

    def begin(self, index: int) -> Iterator[Work]:
        """Begins a round with its first bucket: gathers what all ranks have found in the last one."""
        if index != self.first:
            return
        size = self._communicator.size
        if size > 1:
            yield from self._gather(size)
        else:
            self.rounds += 1
        self._own, self._means, self._is_whole = {}, {}, False

    def _gather(self, size: int) -> Iterator[Work]:
        device = self._communicator.device
        counts = [float(self._is_whole), float(self.rounds), self.share]
        sums = [torch.stack([*found.values()]).sum() for found in (self._own, self._means) if found and self._is_whole]
        # waits: once a round.
        own = torch.tensor(counts + [0.0] * 2, dtype=torch.float64, device=device)
        if sums:
            own[3:] = torch.stack(sums)
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

    def sent(self, index: int, difference: torch.Tensor) -> None:
        """Remembers how long this rank's pseudo-gradient of a bucket is."""
        if self._communicator.size > 1:
            self._own[index] = _square(difference)

    def received(self, index: int, mean: torch.Tensor) -> None:
        """Remembers how long the mean of all ranks is, in the order in which buckets are exchanged."""
        if self._communicator.size > 1:
            self._means[index] = _square(mean)
            self._is_whole = True

    def outer_lr(self) -> float:
        """Returns the learning rate of this round: step 2."""
        return ALONE[0] if self._communicator.size == 1 else lr_after(self.share)

    def momentum(self, lr: float) -> float:
        """Returns the momentum of this round: steps 3 and 4.

        Args:
            lr: the outer learning rate: without momentum outer parameters go so many times as far as a pseudo-gradient.
        """
        if self._communicator.size == 1:
            return min(ALONE[1], _rising(self.rounds))
        return momentum_after(self.rounds, self.share, lr)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        # waits: for a checkpoint.
        sums = [[[index, float(each)] for index, each in found.items()] for found in (self._own, self._means)]
        return {"rounds": self.rounds, "share": self.share, "own": sums[0], "means": sums[1]}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned; without sums of squares where ranks have become others since."""
        self.rounds, self.share = int(numbers.get("rounds", 0)), float(numbers.get("share", 0.0))
        device = self._communicator.device
        for found, key in ((self._own, "own"), (self._means, "means")):
            found.clear()
            for index, value in numbers.get(key, []):
                # waits: for a checkpoint.
                found[int(index)] = torch.tensor(value, dtype=torch.float64, device=device)
        self._is_whole = bool(self._means)


def lr_after(share: float) -> float:
    """Returns the outer learning rate of a round, if ranks have agreed on a share in the last one."""
    place = (share - _SHARES[0]) / (_SHARES[1] - _SHARES[0])
    return _RATES[0] + (_RATES[1] - _RATES[0]) * min(max(place, 0.0), 1.0)


def momentum_after(rounds: int, share: float, lr: float) -> float:
    """Returns the momentum of a round.

    Args:
        rounds: that have begun, with this one.
        share: on which ranks have agreed in the last one.
        lr: the outer learning rate.
    """
    far = max(lr, _FAR * share * share)
    return max(0.0, min(1 - lr / far, _rising(rounds), _MOST))


def _rising(rounds: int) -> float:
    return max(rounds - 1, 0) / (rounds + _SLOW)


def _square(vector: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return length.square()
