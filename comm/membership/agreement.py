"""One rank's part in an agreement on the members of the next epoch: no clock, no thread, no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EVIDENCE, NOTICE, SILENCE = "evidence", "notice", "silence"
# A rank that one rank has evidence of is lost, whatever others think.
_STRENGTH = (SILENCE, EVIDENCE, NOTICE)

Letter = dict[str, Any]
Ballot = tuple[int, int]  # of a leader: its count, and its rank


@dataclass(frozen=True)
class Suspicion:
    """Why a rank is not counted on.

    Attributes:
        kind: "evidence", that its connections broke; "notice", that it left; or "silence".
        reason: in words.
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Census:
    """What all members of an epoch have agreed on.

    Attributes:
        epoch: the number of the new one.
        members: its ranks, as numbers of the first epoch, in order.
        lost: the ranks that are no members any more, with the reasons.
        reports: what each member has reported of itself.
        joined: what was known of each member that is new, by its name.
    """

    epoch: int
    members: tuple[int, ...]
    lost: Mapping[int, str]
    reports: Mapping[int, Any]
    joined: Mapping[int, Any] = field(default_factory=dict)

    def to_json(self) -> Letter:
        """Returns it as a letter has it."""
        return {
            "epoch": self.epoch,
            "members": list(self.members),
            "lost": {str(rank): reason for rank, reason in self.lost.items()},
            "reports": {str(rank): report for rank, report in self.reports.items()},
            "joined": {str(rank): each for rank, each in self.joined.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Census:
        """Returns what `to_json` made a letter of."""
        lost = {int(rank): reason for rank, reason in value["lost"].items()}
        reports = {int(rank): report for rank, report in value["reports"].items()}
        joined = {int(rank): each for rank, each in value["joined"].items()}
        return cls(value["epoch"], tuple(value["members"]), lost, reports, joined)


@dataclass(frozen=True)
class Quota:
    """What the members of an epoch have to be.

    Attributes:
        minimum: the least number of them.
        majority: True if they have to be more than half of those before, whatever is known of the others. False if that holds
            only where a rank is left out because nothing comes from it.
    """

    minimum: int = 1
    majority: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the arguments of an equal one."""
        return {"minimum": self.minimum, "majority": self.majority}

    def refusal(self, before: Sequence[int], after: Sequence[int], suspicions: Mapping[int, Suspicion]) -> str:
        """Returns why members of an epoch may not go on as another one; empty if they may."""
        if len(after) < self.minimum:
            return f"{len(after)} of {len(before)} ranks are left, and at least {self.minimum} have to be"
        if 2 * len(after) > len(before):
            return ""
        silent = [rank for rank in before if rank not in after and suspicions[rank].kind == SILENCE]
        if silent or self.majority:
            ranks = ", ".join(map(str, silent or [rank for rank in before if rank not in after]))
            why = "nothing comes from" if silent else "a majority was asked for, without"
            return (
                f"{why} ranks {ranks}, and ranks {', '.join(map(str, after))} are not more than half of {len(before)}: the "
                "others may be training on, behind a network that is cut"
            )
        return ""

    def rivalry(self, before: Sequence[int], asked: Sequence[int], suspicions: Mapping[int, Suspicion]) -> str:
        """Returns why ranks that are not asked may decide something else on their own; empty if they cannot."""
        others = [rank for rank in before if rank not in asked and (self.majority or suspicions[rank].kind == SILENCE)]
        if not others or 2 * len(asked) > len(before):
            return ""
        return (
            f"nothing is known of ranks {', '.join(map(str, others))}, and ranks {', '.join(map(str, asked))} are not more than "
            f"half of {len(before)}: the others may be training on, behind a network that is cut"
        )


@dataclass
class _Leading:
    """What a leader knows of its present ballot: who was asked, who promised, and who accepted what."""

    ballot: Ballot
    asked: frozenset[int]
    promised: dict[int, tuple[Ballot, Letter] | None] = field(default_factory=dict)
    value: Census | None = None
    accepted: set[int] = field(default_factory=set)


class Agreement:
    """Agrees with the other members of an epoch on the members of the next one (after Lamport's Paxos, 1998).

    Letters between two ranks arrive in order, if at all. A rank may be lost at any moment.

    1. A rank that comes to the end of an epoch sends all others its report.
    2. The lowest rank that is not suspected leads. It asks all that it does not suspect what they have accepted before. Those
       that answer promise to accept nothing of a lower ballot.
    3. A rank answers the lowest one that it does not suspect itself, and others once that has changed. Answers contain
       suspicions. Where one is new, the leader begins again, with a higher ballot. Of two ranks that suspect each other, the one
       that the leader heard of first is left out. A rank is suspected no more once it asks, unless it has left.
    4. When all have answered, and all reports are here, it proposes them as members, if `Quota` allow. A proposal that some rank
       accepted before is proposed again instead: a leader that was lost may have decided on it.
    5. When all that were asked have accepted, it is decided. Each rank that learns of a decision sends it to all others of its
       epoch, once. So a rank that is left out, and lives, learns of it too.
    6. A letter of an earlier epoch is answered by the decision that ended that.

    Two decisions of one epoch could differ only if no rank were a member of both. One of these would not be a majority, so that
    it may leave out only ranks of which there is evidence.

    Attributes:
        epoch: the present one, from 1.
        members: its ranks, as numbers of the first epoch.
        ended: what has ended each epoch.
        wanting: what is known of processes that want to join, by a name of the caller's; "sponsor" is the member that they
            asked.
        next_name: of the next rank that joins: no name is used again.
        suspicions: of members of this epoch.
        refusal: why this rank cannot go on; empty if it may.
        terms: what the members of an epoch have to be.
    """

    def __init__(
        self,
        rank: int,
        members: Iterable[int],
        post: Callable[[int, Letter], None],
        terms: Quota,
        epoch: int = 1,
        next_name: int | None = None,
    ) -> None:
        """Begins an epoch.

        Args:
            rank: this one.
            members: all ranks.
            post: sends a letter, made of what JSON has, to a rank.
            terms: what the members of an epoch have to be.
            epoch: its number.
            next_name: of the next rank that joins; if None, the number behind the last member's.
        """
        self.rank, self.epoch, self.members = rank, epoch, tuple(sorted(members))
        self.ended: dict[int, Census] = {}
        self.wanting: dict[str, Any] = {}
        self.next_name = self.members[-1] + 1 if next_name is None else next_name
        self.suspicions: dict[int, Suspicion] = {}
        self.refusal = ""
        self._post, self.terms = post, terms
        self._begin()

    def _begin(self) -> None:
        self._reports: dict[int, Any] = {}
        self._promised: Ballot = (0, -1)
        self._accepted: tuple[Ballot, Letter] | None = None
        self._leading: _Leading | None = None
        self._questions: dict[int, Letter] = {}  # of ranks that do not lead, as far as this one knows
        self._ending_since: float | None = None

    @property
    def is_changing(self) -> bool:
        """True if a member has come to the end of this epoch, or a process wants to join."""
        return bool(self._reports or self.wanting) and not self.refusal

    @property
    def is_ending(self) -> bool:
        """True if a member has come to the end of this epoch."""
        return bool(self._reports) and not self.refusal

    @property
    def waiting(self) -> list[int]:
        """The members that are counted on, and have not come to the end of the epoch."""
        return [rank for rank in self._trusted() if rank not in self._reports]

    def invite(self, key: str, about: Mapping[str, Any]) -> None:
        """Lets this epoch end, so that a process joins; each member calls it, sooner or later."""
        if not self._knows_sponsor(about):
            return
        if all(about != each for census in self.ended.values() for each in census.joined.values()):
            self.wanting[key] = about
            self._lead()

    def _knows_sponsor(self, about: Mapping[str, Any]) -> bool:
        """Returns True if the member is there that a process has asked, which alone can answer it."""
        return about["sponsor"] in self.members

    def report(self, value: Any) -> None:
        """Comes to the end of this epoch.

        Args:
            value: what the others are to know of this rank, made of what JSON has.
        """
        self._reports[self.rank] = value
        self._send_all({"what": "report", "report": value})
        self._lead()

    def suspect(self, rank: int, kind: str, reason: str) -> None:
        """Counts on a rank no more; of several kinds of suspicion the strongest holds."""
        if self._add(rank, kind, reason):
            if self.is_changing:
                self._send_all({"what": "suspect", "suspicions": {str(rank): [kind, reason]}})
            for sender, question in list(self._questions.items()):
                self._hear_prepare(sender, question)
            self._lead()

    def suspect_late(self, now: float, timeout: float, reason: str) -> None:
        """Counts no more on members that answer, and do not come to the end of the epoch in time; called now and then.

        Args:
            now: the time, by any clock.
            timeout: seconds from the call at which a member was first seen there.
            reason: in words.
        """
        if not self.is_ending:
            self._ending_since = None
        elif self._ending_since is None or now < self._ending_since:
            self._ending_since = now
        elif now > self._ending_since + timeout:
            for rank in self.waiting:
                self.suspect(rank, SILENCE, reason)

    def hear(self, sender: int, letter: Letter) -> None:
        """Takes a letter."""
        epoch = letter["epoch"]
        if self.refusal or epoch > self.epoch:
            return
        if epoch < self.epoch:
            if letter["what"] != "decided" and epoch in self.ended:
                self._post(sender, self._decided(epoch))
            return
        if sender not in self.members:
            return
        known = self.suspicions.get(sender)
        if letter["what"] == "prepare" and known is not None and known.kind != NOTICE:
            # It lives, and others count on it: two that lead would refuse each other's ballots for ever.
            del self.suspicions[sender]
        getattr(self, f"_hear_{letter['what']}")(sender, letter)
        self._lead()

    def _hear_report(self, sender: int, letter: Letter) -> None:
        self._reports[sender] = letter["report"]

    def _hear_suspect(self, sender: int, letter: Letter) -> None:
        # Others have to find out for themselves: a broken connection between two ranks must not cost both.
        if self._trusted()[0] == self.rank and sender not in self.suspicions:
            for rank, (kind, reason) in letter["suspicions"].items():
                self._add(int(rank), kind, reason)

    def _hear_prepare(self, sender: int, letter: Letter) -> None:
        kept = self._questions.pop(sender, None)
        if kept is not None and tuple(kept["ballot"]) > tuple(letter["ballot"]):
            letter = kept
        if self._trusted()[0] < sender:
            self._questions[sender] = letter
            return
        ballot: Ballot = tuple(letter["ballot"])
        if ballot < self._promised:
            self._send(sender, {"what": "refused", "ballot": list(self._promised)})
            return
        self._promised = ballot
        accepted = None if self._accepted is None else [list(self._accepted[0]), self._accepted[1]]
        told = {str(rank): [each.kind, each.reason] for rank, each in self.suspicions.items()}
        self._send(sender, {"what": "promise", "ballot": list(ballot), "accepted": accepted, "suspicions": told})

    def _hear_promise(self, sender: int, letter: Letter) -> None:
        self._hear_suspect(sender, letter)
        if self._leading is not None and tuple(letter["ballot"]) == self._leading.ballot:
            accepted = letter["accepted"]
            self._leading.promised[sender] = None if accepted is None else (tuple(accepted[0]), accepted[1])

    def _hear_refused(self, sender: int, letter: Letter) -> None:
        self._promised = max(self._promised, tuple(letter["ballot"]))

    def _hear_accept(self, sender: int, letter: Letter) -> None:
        ballot: Ballot = tuple(letter["ballot"])
        if ballot < self._promised:
            self._send(sender, {"what": "refused", "ballot": list(self._promised)})
            return
        self._promised, self._accepted = ballot, (ballot, letter["value"])
        self._send(sender, {"what": "accepted", "ballot": list(ballot)})

    def _hear_accepted(self, sender: int, letter: Letter) -> None:
        if self._leading is not None and tuple(letter["ballot"]) == self._leading.ballot:
            self._leading.accepted.add(sender)

    def _hear_decided(self, sender: int, letter: Letter) -> None:
        self._decide(Census.from_json(letter["value"]))

    def _trusted(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.suspicions]

    def _add(self, rank: int, kind: str, reason: str) -> bool:
        if rank == self.rank or rank not in self.members:
            return False
        known = self.suspicions.get(rank)
        if known is not None and _STRENGTH.index(known.kind) >= _STRENGTH.index(kind):
            return False
        self.suspicions[rank] = Suspicion(kind, reason)
        return True

    def _lead(self) -> None:
        """Does what is to be done next, if this rank leads and the epoch is to end."""
        trusted = self._trusted()
        if not self.is_changing or not trusted or trusted[0] != self.rank:
            self._leading = None
            return
        leading = self._leading
        if leading is None or leading.asked != frozenset(trusted) or leading.ballot < self._promised:
            ballot = (self._promised[0] + 1, self.rank)
            self._promised = ballot
            self._leading = leading = _Leading(ballot, frozenset(trusted), {self.rank: self._accepted})
            for rank in trusted:
                if rank != self.rank:
                    self._send(rank, {"what": "prepare", "ballot": list(ballot)})
        if leading.value is None and leading.asked <= leading.promised.keys():
            self._propose(leading, trusted)
        if leading.value is not None and leading.asked <= leading.accepted:
            self._decide(leading.value)

    def _propose(self, leading: _Leading, trusted: Sequence[int]) -> None:
        earlier = [each for each in leading.promised.values() if each is not None]
        if earlier:
            # Who has accepted it may be among ranks that are asked no more.
            if refusal := self.terms.rivalry(self.members, trusted, self.suspicions):
                self._refuse(refusal)
                return
            value = Census.from_json(max(earlier, key=lambda each: each[0])[1])
        elif not {*trusted} <= self._reports.keys():
            return
        else:
            if refusal := self.terms.refusal(self.members, trusted, self.suspicions):
                self._refuse(refusal)
                return
            lost = {rank: f"{each.kind}: {each.reason}" for rank, each in sorted(self.suspicions.items())}
            reports = {rank: self._reports[rank] for rank in trusted}
            asked = [each for _, each in sorted(self.wanting.items()) if each["sponsor"] in trusted]
            # A silent rank may live, and not have this decision. A member that is new has no part in what came before, so that it
            # could go on alone beside that one. It waits for the next epoch.
            is_sure = all(each.kind != SILENCE for each in self.suspicions.values())
            joined = dict(enumerate(asked if is_sure and self._admits(reports) else [], self.next_name))
            value = Census(self.epoch + 1, (*trusted, *joined), lost, reports, joined)
        leading.value = value
        leading.accepted = {self.rank}
        self._accepted = (leading.ballot, value.to_json())
        for rank in leading.asked - {self.rank}:
            self._send(rank, {"what": "accept", "ballot": list(leading.ballot), "value": value.to_json()})

    @staticmethod
    def _admits(reports: Mapping[int, Any]) -> bool:
        """Returns True if all members wait for new ones at the addresses that they have reported."""
        return all(isinstance(each, Mapping) and each.get("address") for each in reports.values())

    def _refuse(self, reason: str) -> None:
        # Others, of whom this rank hears nothing, may be enough without it.
        for rank in self._trusted():
            if rank != self.rank:
                self._send(rank, {"what": "refuse", "reason": reason})
        self.refusal = reason

    def _hear_refuse(self, sender: int, letter: Letter) -> None:
        # The leader knows of the same suspicions, and of no fewer ranks.
        if sender not in self.suspicions:
            self.refusal = letter["reason"]

    def _decide(self, decision: Census) -> None:
        self.ended[self.epoch] = decision
        self._send_all(self._decided(self.epoch))
        if self.rank not in decision.members:
            lost = decision.lost.get(self.rank, "it did not answer")
            self.refusal = f"the other ranks went on without this one ({lost})"
            return
        self.epoch, self.members = decision.epoch, decision.members
        self.next_name = max(self.next_name, decision.members[-1] + 1)
        done = list(decision.joined.values())
        # What a lost rank was asked nobody answers: the process asks another one.
        self.wanting = {
            key: each for key, each in self.wanting.items() if each not in done and self._knows_sponsor(each)
        }
        self.suspicions = {rank: each for rank, each in self.suspicions.items() if rank in self.members}
        self._begin()

    def _decided(self, epoch: int) -> Letter:
        """Returns the letter about the decision that ended an epoch."""
        return {"what": "decided", "epoch": epoch, "value": self.ended[epoch].to_json()}

    def _send_all(self, letter: Letter) -> None:
        for rank in self.members:
            if rank != self.rank:
                self._send(rank, letter)

    def _send(self, rank: int, letter: Letter) -> None:
        self._post(rank, {"epoch": self.epoch, **letter})
