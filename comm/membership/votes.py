"""Numbers on which the members of an epoch agree, though some are lost meanwhile."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bagua_kernels.comm.mailbox.courier import weakly
from bagua_kernels.comm.membership.agreement import SILENCE, Agreement, Letter, Quota, Suspicion

MOST = (1 << 63) - 1  # the largest number that a member may give


class Votes:
    """One rank's part in the votes of one epoch, which follow each other.

    A vote is an `Agreement`, of which nothing but the reports is used: each is the number that a member gives. What ends an
    epoch of that agreement ends a vote. A member that is left out of one votes no more in this epoch.

    Attributes:
        epoch: of the members.
    """

    def __init__(
        self,
        rank: int,
        members: Iterable[int],
        post: Callable[[int, Letter], None],
        terms: Quota,
        epoch: int,
    ) -> None:
        """Has no vote yet; for the arguments see `Agreement`."""
        self.epoch, self._send = epoch, post
        self._agreement = Agreement(rank, members, weakly(self._post), terms)
        self._known: set[tuple[int, str]] = set()

    @property
    def refusal(self) -> str:
        """Why this rank has no part in votes any more; empty if it has."""
        return self._agreement.refusal

    def give(self, value: int) -> int:
        """Gives a number for the next vote; returns which vote that is."""
        vote = self._agreement.epoch
        self._agreement.report(value)
        return vote

    def result(self, vote: int) -> int | None:
        """Returns the bitwise AND of what the members gave that were left at the end of a vote.

        None while it goes on, and where this rank was left out.
        """
        census = self._agreement.ended.get(vote)
        if census is None or self._agreement.rank not in census.members:
            return None
        return functools.reduce(operator.and_, (int(census.reports[name]) for name in census.members))

    def hear(self, sender: int, letter: Mapping[str, Any]) -> None:
        """Takes a letter about votes; one of another epoch is ignored, because all its votes have ended."""
        if letter["epoch"] == self.epoch:
            self._agreement.hear(sender, letter["letter"])
            # Members that have come to a vote have the result of the one before, or have sent that they are left out.
            for vote in [each for each in self._agreement.ended if each < self._agreement.epoch - 2]:
                del self._agreement.ended[vote]

    def suspect(self, suspicions: Mapping[int, Suspicion]) -> None:
        """Counts no more on members that are suspected; each suspicion counts once, for a member may refute it by a letter."""
        for name, each in suspicions.items():
            if (name, each.kind) not in self._known:
                self._known.add((name, each.kind))
                self._agreement.suspect(name, each.kind, each.reason)

    def find_silent(self, name: int, reason: str) -> None:
        """Counts no more on a member from which nothing has come for the timeout, whatever was known of it before."""
        self._agreement.suspect(name, SILENCE, reason)

    def watch(self, now: float, timeout: float) -> None:
        """Counts no more on members that answer, and give no number within a time.

        Args:
            now: the time, by any clock.
            timeout: seconds from the moment at which this rank learned that the vote has begun.
        """
        reason = f"it answers, but did not call agree() within {timeout:g} s of another member"
        self._agreement.suspect_late(now, timeout, reason)

    def _post(self, name: int, letter: Letter) -> None:
        self._send(name, {"epoch": self.epoch, "letter": letter})
