"""Random agreements on members, by the protocol alone: no clock, no thread, no socket.

    python -m tests.comm.membership.agreement_fuzz --schedules 20000 --seed 0

Ranks end, leave, are cut off, and are taken for silent at random moments, and others join. `--seed SEED --schedules 1 --kind
KIND` repeats one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from bagua_kernels.comm.membership.agreement import EVIDENCE, NOTICE, SILENCE, Agreement, Census, Quota

# Of a livelock; the longest schedule that ends sends a tenth of that.
MOST_LETTERS = 8000
MOST_MOVES = 20_000
KINDS = ("losses", "joins", "breaks", "silences", "cuts", "majority")
Pair = tuple[int, int]


class Wrong(AssertionError):
    """An invariant that does not hold."""


class Job:
    """Ranks whose letters wait, in order between two of them, until they are delivered.

    Kinds of schedules:

    - losses: up to three ranks end, or leave with notice.
    - joins: as well, up to two processes ask to join. Some connect in vain.
    - breaks: connections between living ranks break.
    - silences: ranks that live are taken for silent.
    - cuts: nothing is delivered between two parts for a while, and they take each other for silent.
    - majority: all of that, where only more than half may go on.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.kind, self.draws = kind, random.Random(seed)
        draws, everything = self.draws, kind == "majority"
        # Connections that are broken leave each two ranks a third one that both know.
        self.size = draws.randint(6, 8) if kind == "breaks" else draws.randint(3, 8)
        self.terms = Quota(majority=everything)
        self.left = {
            "end": draws.randint(0, 1) if kind in ("breaks", "cuts") else draws.randint(1, 3),
            "wish": draws.randint(0, 2) if everything or kind == "joins" else 0,
            "silence": draws.randint(0, 3) if everything or kind == "silences" else 0,
            "break": draws.randint(0, 2) if everything or kind == "breaks" else 0,
            "cut": draws.randint(0, 2) if everything or kind == "cuts" else 0,
        }
        self.waiting: dict[Pair, deque[tuple[str, Any]]] = {}
        self.dead: set[int] = set()
        self.broken: set[frozenset[int]] = set()
        self.cut: set[frozenset[int]] = set()
        self.agreements: dict[int, Agreement] = {}
        self.entered: dict[int, int] = {}
        self.reported: dict[int, int] = {}
        self.connecting: dict[int, Census] = {}
        self.early: dict[int, list[tuple[int, Any]]] = {}
        self.letters = self.keys = 0
        for rank in range(self.size):
            self._add(rank, range(self.size), 1, None)

    def _add(self, rank: int, members: Sequence[int], epoch: int, next_name: int | None) -> None:
        self.agreements[rank] = Agreement(rank, members, self._post_of(rank), self.terms, epoch, next_name)
        self.entered[rank], self.reported[rank] = epoch, 0

    def _post_of(self, rank: int) -> Callable[[int, Any], None]:
        def post(dst: int, letter: Any) -> None:
            self.letters += 1
            if self.letters > MOST_LETTERS:
                raise Wrong("letters without end")
            census = self.connecting.get(rank)
            if dst not in self.agreements or (census is not None and dst in census.joined):
                # As `Membership`: new members get them when they have connected.
                self.early.setdefault(rank, []).append((dst, letter))
            elif frozenset((rank, dst)) not in self.broken:
                self._queue(rank, dst).append(("letter", letter))

        return post

    def _queue(self, src: int, dst: int) -> deque[tuple[str, Any]]:
        return self.waiting.setdefault((src, dst), deque())

    @property
    def living(self) -> list[Agreement]:
        return [each for rank, each in self.agreements.items() if rank not in self.dead]

    @property
    def going(self) -> list[Agreement]:
        return [each for each in self.living if not each.refusal]

    def deliver(self, pair: Pair) -> None:
        what, body = self.waiting[pair].popleft()
        agreement = self.agreements[pair[1]]
        if what == "letter":
            agreement.hear(pair[0], body)
        elif what == "wish":
            agreement.invite(body["key"], body)
        else:
            agreement.suspect(pair[0], what, "gone")

    def end(self, rank: int) -> None:
        """Ends a rank; of what it has sent a part still arrives, and then evidence of its end, or its notice."""
        leaves = not self.agreements[rank].refusal and self.draws.random() < 0.25
        self.dead.add(rank)
        for other in self.agreements:
            if other in self.dead:
                continue
            letters = self._queue(rank, other)
            for _ in range(0 if leaves else self.draws.randrange(len(letters) + 1)):
                letters.pop()
            letters.append((NOTICE if leaves else EVIDENCE, None))
            self.waiting.pop((other, rank), None)

    def connect(self) -> None:
        """Connects the members of an epoch that has new ones, once all are there; in vain where one of them is lost."""
        for rank, census in list(self.connecting.items()):
            if rank in self.dead:
                del self.connecting[rank]
                continue
            old = [name for name in census.members if name not in census.joined]
            gone = [
                name
                for name in old
                if name in self.dead
                or self.agreements[name].refusal
                or (name not in self.connecting and self.entered[name] >= census.epoch)
            ]
            there = not gone and all(self.connecting.get(name) == census for name in old)
            if there and self.draws.random() < 0.85:
                for name in census.joined:
                    self._add(name, census.members, census.epoch, self.agreements[rank].next_name)
                for name in old:
                    del self.connecting[name]
                    self.entered[name] = census.epoch
                    for dst, letter in self.early.pop(name, []):
                        self._post_of(name)(dst, letter)
                return
            if there or gone:
                del self.connecting[rank]
                self.entered[rank] = census.epoch
                self.early.pop(rank, None)
                for name in census.joined:
                    self.agreements[rank].suspect(name, EVIDENCE, "it did not connect")
                return

    def _enter(self, rank: int) -> None:
        census = self.agreements[rank].ended[self.entered[rank]]
        if census.joined:
            self.connecting[rank] = census
        else:
            self.entered[rank] = census.epoch

    def _moves(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """What may happen next."""
        moves: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for pair, letters in self.waiting.items():
            if letters and pair[1] not in self.dead and frozenset(pair) not in self.cut:
                moves += [(self.deliver, (pair,))] * 2
        for each in self.living:
            rank = each.rank
            if each.refusal:
                moves.append((self.end, (rank,)))
            elif rank in self.connecting:
                moves.append((self.connect, ()))
            elif self.entered[rank] < each.epoch:
                moves.append((self._enter, (rank,)))
            elif self.reported[rank] < each.epoch and (each.suspicions or each.is_changing):
                moves.append((self._report, (rank,)))
        return moves

    def _report(self, rank: int) -> None:
        self.reported[rank] = self.entered[rank]
        self.agreements[rank].report({"rank": rank, "epoch": self.entered[rank], "address": ["host", rank]})

    def _trouble(self) -> None:
        """Lets something happen that the ranks do not do themselves."""
        draws, going = self.draws, self.going
        kinds = [kind for kind, count in self.left.items() if count]
        kind = draws.choice(kinds)
        self.left[kind] -= 1
        one = draws.choice(going)
        others = [name for name in one.members if name != one.rank]
        if kind == "end":
            self.end(one.rank)
        elif kind == "wish":
            self.keys += 1
            about = {"key": f"process {self.keys}", "sponsor": one.rank, "address": ["host", self.keys]}
            for name in others:
                if name in self.agreements and name not in self.dead:
                    self._queue(one.rank, name).append(("wish", about))
            one.invite(about["key"], about)
        elif kind == "silence" and others:
            one.suspect(draws.choice(others), SILENCE, "no word")
        elif kind == "break":
            first, second = (each.rank for each in draws.sample(going, 2))
            self.broken.add(frozenset((first, second)))
            for letters in (self._queue(first, second), self._queue(second, first)):
                for _ in range(draws.randrange(len(letters) + 1)):
                    letters.pop()
                letters.append((EVIDENCE, None))
        elif kind == "cut":
            part = set(draws.sample([each.rank for each in going], draws.randint(1, len(going) - 1)))
            self.cut = {frozenset((a, b)) for a in part for b in self.agreements if b not in part}

    def _across(self) -> list[tuple[int, int]]:
        """The ranks that have not yet taken another one for silent that is behind the cut."""
        return [
            (each.rank, name)
            for each in self.going
            for name in each.members
            if frozenset((each.rank, name)) in self.cut and name not in each.suspicions
        ]

    def play(self) -> None:
        """Plays until nothing happens any more, and checks what has come of it.

        Raises:
            Wrong: something is not as it has to be.
        """
        for count in itertools.count():
            if count > MOST_MOVES:
                raise Wrong("epochs without end")
            moves = self._moves()
            chance = 0.06 if moves else 1.0
            if any(self.left.values()) and len(self.going) > 1 and self.draws.random() < chance:
                self._trouble()
            elif self.cut and (not moves or self.draws.random() < 0.15) and (pairs := self._across()):
                rank, name = self.draws.choice(pairs)
                self.agreements[rank].suspect(name, SILENCE, "no word")
            elif self.cut and (not moves or self.draws.random() < 0.02):
                self.cut = set()
            elif moves:
                move, arguments = self.draws.choice(moves)
                move(*arguments)
            else:
                break
        self._check()

    def _check(self) -> None:
        decided: dict[int, Census] = {}
        names: dict[int, Any] = {}
        # Where silence misleads, what one rank goes on with alone may differ from what ranks had decided that are gone.
        knowing = self.living if self.kind in ("silences", "cuts") else list(self.agreements.values())
        for each in knowing:
            for census in each.ended.values():
                if decided.setdefault(census.epoch, census) != census:
                    raise Wrong(f"two decisions: {decided[census.epoch]} and {census}")
                if {*census.reports, *census.joined} != {*census.members}:
                    raise Wrong(f"members without a report: {census}")
                for name, about in census.joined.items():
                    if names.setdefault(name, about) != about or name < self.size:
                        raise Wrong(f"the name {name} is given twice")
        for each in self.going:
            if each.is_changing or each.suspicions or self.entered[each.rank] != each.epoch:
                raise Wrong(f"rank {each.rank} waits in epoch {each.epoch} for ever")
            if self.dead & {*each.members}:
                raise Wrong(f"rank {each.rank} counts on ranks that ended: {each.members}")
        if len({(each.epoch, each.members) for each in self.going}) > 1:
            raise Wrong(f"members differ: {[(each.rank, each.epoch, each.members) for each in self.going]}")
        if self.kind in ("losses", "joins") and {*self.going[0].members} != {each.rank for each in self.living}:
            raise Wrong(f"ranks that live are left out: {self.going[0].members}")


def faults(seeds: Sequence[int], kinds: Sequence[str] = KINDS) -> dict[tuple[str, int], str]:
    """Plays schedules; returns what is wrong, by kind and seed."""
    found = {}
    for seed in seeds:
        for kind in kinds:
            try:
                Job(seed, kind).play()
            except Wrong as error:
                found[kind, seed] = str(error)
                print(f"--kind {kind} --seed {seed}: {error}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays schedules and prints what is wrong; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS, help="one alone")
    options = parser.parse_args(arguments)
    kinds = KINDS if options.kind is None else (options.kind,)
    found = faults(range(options.seed, options.seed + options.schedules), kinds)
    print(f"{options.schedules * len(kinds)} schedules, {len(found)} with faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
