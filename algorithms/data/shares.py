"""How ranks that have become others go on with the samples of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua_kernels.algorithms.data.places import Places, Ranges


@dataclass(frozen=True)
class Shares:
    """How ranks that have become others go on with the samples of rounds; the same on all of them.

    Attributes:
        places: of samples that nobody has drawn, from the round under way on.
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
        shares = [cls.from_json(told["shares"]) for told in reports]
        before = max(shares, key=lambda each: each.changed)
        known = [told for told, each in zip(reports, shares, strict=True) if each.changed == before.changed]
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
