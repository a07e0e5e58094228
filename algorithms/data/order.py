"""The order of an epoch: sorted by cost, with random places among equals and near equals. NumPy alone; nothing of ranks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]
Costs: TypeAlias = npt.NDArray[np.float64]

# Many numbers of ranks divide each of them, so that no step lies across two runs.
RUNS = (24, 48, 120, 240, 480, 960)
_LEAST_RUNS = 100  # of a dataset, for a shuffle that deserves the name


class CostOrder:
    """Samples in ascending order of cost, drawn anew for each epoch.

    `plain` is the order without chance. In `draw` samples of equal cost come in random order. With `random_level` L each
    sample moves up by a random part of L times all places: none at 0, and at 1 neighbours' costs have little to do with each
    other.

    A sort of 64-bit words is several times faster than one of indices by key. Therefore a word holds both: the place, with as
    many fractional bits as there is room for, and below it the sample's index.
    """

    def __init__(self, costs: Costs, random_level: float) -> None:
        """Sorts once.

        Args:
            costs: of each sample, positive and finite, shape (samples,).
            random_level: from 0 to 1.
        """
        self._index_bits = max(1, int(len(costs) - 1).bit_length())
        self.plain: Indices = np.argsort(costs, kind="stable").astype(np.int64)
        self._level = random_level
        in_order = costs[self.plain]
        first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        lengths = np.diff(np.r_[first, len(costs)])
        self._ties = len(first) < len(costs)
        # Of each place: where its equals begin, and how many they are.
        self._begin = np.repeat(first, lengths) if self._ties else np.arange(len(costs))
        self._length = np.repeat(lengths, lengths) if self._ties else lengths

    def draw(self, generator: np.random.Generator) -> Indices:
        """Returns all samples in an order of their own, shape (samples,)."""
        if not self._ties and not self._level:
            return self.plain
        # A place is below twice the number of samples.
        shift = 64 - 2 * self._index_bits - 1
        place = self._begin.astype(np.float64)
        if self._ties:
            place += generator.random(len(place)) * self._length
        if self._level:
            place += generator.random(len(place)) * (self._level * len(place))
        # 2^53 is what float64 holds exactly; further bits would be zeros.
        words = np.ldexp(place, min(shift, 53 - self._index_bits)).astype(np.uint64)
        words <<= np.uint64(self._index_bits)
        words |= self.plain.astype(np.uint64)
        words.sort()
        words &= np.uint64((1 << self._index_bits) - 1)
        return words.astype(np.int64)


def run_of(samples: int) -> int:
    """How many samples of similar cost stay together by default: the most that leave a hundred runs, and at least 24."""
    fitting = [run for run in RUNS if run * _LEAST_RUNS <= samples]
    return fitting[-1] if fitting else RUNS[0]


def shuffle_runs(order: Indices, run: int, generator: np.random.Generator) -> Indices:
    """Returns an order whose runs of neighbours come in random order; the short one, from a random place, comes last."""
    whole, rest = divmod(len(order), run)
    begin = run * int(generator.integers(whole + 1))
    short, others = order[begin : begin + rest], np.concatenate([order[:begin], order[begin + rest :]])
    return np.concatenate([others.reshape(whole, run)[generator.permutation(whole)].ravel(), short])
