"""Places in an endless sequence, of which some come before those that follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Ranges = list[tuple[int, int]]  # the first place, and the one behind the last, of each


class Places:
    """First the places of some ranges, and then all from one on.

    Attributes:
        ranges: those that come first.
        base: the first place of those that follow.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = (), base: int = 0) -> None:
        """Takes ranges, of which empty ones do not count."""
        self.ranges: Ranges = [(begin, end) for begin, end in ranges if begin < end]
        self.base = base
        self._count = sum(end - begin for begin, end in self.ranges)

    def at(self, index: int) -> int:
        """Returns the place of an index, from 0."""
        if index >= self._count:
            return self.base + index - self._count
        for begin, end in self.ranges:
            if index < end - begin:
                break
            index -= end - begin
        return begin + index

    def pieces(self, first: int, behind: int) -> Ranges:
        """Returns the places of a range of indices."""
        found, index = [], 0
        for begin, end in self.ranges:
            low, high = max(first, index), min(behind, index + end - begin)
            if low < high:
                found.append((begin + low - index, begin + high - index))
            index += end - begin
        low = max(first, index)
        return [*found, (self.base + low - index, self.base + behind - index)] if low < behind else found

    def after(self, ranges: Ranges, index: int) -> Places:
        """Returns some ranges, and behind them what comes from an index on."""
        return Places([*ranges, *self.pieces(index, self._count)], self.at(max(index, self._count)))
