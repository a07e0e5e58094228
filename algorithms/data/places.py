"""Places in an endless sequence that are left to be drawn, and who has drawn others in vain so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Shares:
    """How ranks that have become others go on with the samples of rounds; the same on all of them.

    Attributes:
        places: what is left, from the round under way on.
        vain: by the name of each rank, what it has drawn for rounds that are not in place yet.
        epoch: of samples, at least.
        changed: the epoch of members that began with these; 0 for none.
    """

    places: Places = field(default_factory=Places)
    vain: Mapping[int, Ranges] = field(default_factory=dict)
    epoch: int = 0
    changed: int = 0

    def to_json(self) -> list[Any]:
        """Returns it as a letter has it."""
        vain = [[name, ranges] for name, ranges in self.vain.items()]
        return [self.places.ranges, self.places.base, vain, self.epoch, self.changed]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Shares:
        """Returns what `to_json` made a letter of."""
        ranges, base, vain, epoch, changed = value
        return cls(
            Places(ranges, base),
            {name: [(begin, end) for begin, end in each] for name, each in vain},
            epoch,
            changed,
        )

    @classmethod
    def agreed(cls, reports: Sequence[Mapping[str, Any]], batch_size: int, changed: int) -> Shares:
        """Deals anew what nobody has drawn of rounds that are not in place, and what ranks have that are lost.

        Args:
            reports: of `RoundSampler.report`, of all ranks that are left.
            batch_size: samples of a step.
            changed: see there.
        """
        # Where a rank was lost in a change, some have begun behind that change, and others have drawn nothing since.
        newest = max(told["shares"][4] for told in reports)
        known = [told for told in reports if told["shares"][4] == newest]
        before = cls.from_json(known[0]["shares"])
        places = before.places
        steps_of: dict[int, list[int]] = {}
        for told in known:
            steps_of[told["place"]] = told["steps"] or steps_of.get(told["place"], [])
        last = max(steps_of)
        open_rounds = {last}
        lost = [told["lost"] for told in known if told["lost"]]
        if lost:
            steps_of[lost[0][0]] = lost[0][1]
            if all(told["lost"] or told["place"] <= lost[0][0] for told in known):
                # Its means are in place nowhere, so that they will be without what lost ranks have found.
                open_rounds.add(lost[0][0])
        is_first = min(open_rounds) == 0  # True if no round is in place since the last change
        vain = {told["name"]: list(before.vain.get(told["name"], []) if is_first else []) for told in reports}
        left = [each for name, all_of in before.vain.items() if is_first and name not in vain for each in all_of]
        at_rank = {told["rank"]: told for told in known}
        for place, steps in sorted(steps_of.items()):
            for rank, count in enumerate(steps):
                begin = place + sum(steps[:rank]) * batch_size
                own = at_rank.get(rank)
                # To the end of rounds that are in place lost ranks have come, too.
                taken = count if place not in open_rounds else 0
                if own is not None:
                    taken = own["drawn"] if own["place"] == place else count if own["place"] > place else 0
                middle = begin + taken * batch_size
                left += places.pieces(middle, begin + count * batch_size)
                if own is not None and place in open_rounds:
                    vain[own["name"]] += places.pieces(begin, middle)
        behind = last + sum(steps_of[last]) * batch_size
        return cls(places.after(left, behind), vain, max(told["epoch"] for told in known), changed)
