"""The agreement on members alone: letters in random order, ranks that end at random moments, networks that are cut."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import pytest

from bagua_kernels.comm.membership.agreement import EVIDENCE, NOTICE, SILENCE, Agreement, Census, Quota, Suspicion
from bagua_kernels.comm.membership.votes import Votes
from tests.comm.membership.agreement_fuzz import faults, main


class Network:
    """Ranks whose letters wait, in order between two of them, until they are delivered."""

    def __init__(self, size: int, terms: Quota | None = None) -> None:
        self.waiting: dict[tuple[int, int], deque[Any]] = {}
        self.dead: set[int] = set()
        self.cut: set[frozenset[int]] = set()  # nothing is delivered between these
        self.broken: set[frozenset[int]] = set()  # and between these it is lost
        self.ranks = [Agreement(rank, range(size), self._post_of(rank), terms or Quota()) for rank in range(size)]

    def _post_of(self, rank: int) -> Any:
        def post(dst: int, letter: Any) -> None:
            assert dst != rank
            if frozenset((rank, dst)) not in self.broken:
                self.waiting.setdefault((rank, dst), deque()).append(letter)

        return post

    def ready(self) -> list[tuple[int, int]]:
        return [
            pair
            for pair, letters in self.waiting.items()
            if letters and pair[1] not in self.dead and frozenset(pair) not in self.cut
        ]

    def deliver(self, pair: tuple[int, int]) -> None:
        self.ranks[pair[1]].hear(pair[0], self.waiting[pair].popleft())

    def drain(self, draws: random.Random) -> None:
        while ready := self.ready():
            self.deliver(draws.choice(ready))

    def kill(self, rank: int, draws: random.Random) -> None:
        """Ends a rank: of what it has sent, a part still arrives."""
        self.dead.add(rank)
        for (src, _), letters in self.waiting.items():
            if src == rank:
                for _ in range(draws.randrange(len(letters) + 1)):
                    letters.pop()

    @property
    def living(self) -> list[Agreement]:
        return [one for one in self.ranks if one.rank not in self.dead]


def test_members_are_those_that_are_left() -> None:
    network, draws = Network(4), random.Random(0)
    network.kill(2, draws)
    for one in network.living:
        one.suspect(2, EVIDENCE, "gone")
        one.report({"steps": 10 + one.rank})
    network.drain(draws)
    expected = Census(2, (0, 1, 3), {2: "evidence: gone"}, {rank: {"steps": 10 + rank} for rank in (0, 1, 3)})
    assert [one.ended for one in network.living] == [{1: expected}] * 3
    assert [(one.epoch, one.members, one.is_changing) for one in network.living] == [(2, (0, 1, 3), False)] * 3


def test_nothing_is_decided_before_all_have_come() -> None:
    network, draws = Network(3), random.Random(1)
    network.kill(0, draws)
    for one in network.living:
        one.suspect(0, EVIDENCE, "gone")
    network.ranks[1].report(1)
    network.drain(draws)
    assert [one.epoch for one in network.living] == [1, 1]
    assert network.ranks[1].waiting == [2]
    network.ranks[2].report(2)
    network.drain(draws)
    assert [one.members for one in network.living] == [(1, 2)] * 2


@pytest.mark.parametrize(
    ("sides", "kind", "terms", "go_on"),
    [
        ([[0, 1], [2, 3]], SILENCE, Quota(), []),
        ([[0, 1, 2], [3]], SILENCE, Quota(), [0, 1, 2]),
        ([[0, 1, 3], [2, 4]], SILENCE, Quota(), [0, 1, 3]),
        ([[0], [1]], SILENCE, Quota(), []),
        ([[1], []], EVIDENCE, Quota(), [1]),
        ([[1], []], EVIDENCE, Quota(majority=True), []),
        ([[1], []], NOTICE, Quota(minimum=2), []),
        ([[1, 2, 3], []], EVIDENCE, Quota(minimum=3, majority=True), [1, 2, 3]),
    ],
)
def test_terms(sides: list[list[int]], kind: str, terms: Quota, go_on: list[int]) -> None:
    """Of a cut network at most one side goes on."""
    size = 1 + max(itertools.chain(*sides))
    network, draws = Network(size, terms), random.Random(2)
    network.dead = set(range(size)) - set(itertools.chain(*sides))
    network.cut = {frozenset(pair) for pair in itertools.product(*sides)}
    for side in sides:
        for rank in side:
            for other in set(range(size)) - set(side):
                network.ranks[rank].suspect(other, kind, "no word")
            network.ranks[rank].report(rank)
    network.drain(draws)
    for one in network.living:
        assert (one.epoch == 2 and list(one.members) == go_on) if one.rank in go_on else one.refusal, one.rank


def test_a_rank_that_was_left_out_learns_of_it() -> None:
    network, draws = Network(4), random.Random(3)
    network.cut = {frozenset((3, rank)) for rank in range(3)}
    for rank in range(3):
        network.ranks[rank].suspect(3, SILENCE, "no word")
        network.ranks[rank].report(None)
    network.drain(draws)
    assert network.ranks[3].epoch == 1
    network.cut = set()
    network.drain(draws)
    assert "went on without this one (silence: no word)" in network.ranks[3].refusal


def test_a_broken_connection_costs_one_of_two() -> None:
    for seed in range(50):
        network, draws = Network(4), random.Random(seed)
        first, second = draws.sample(range(4), 2)
        network.broken = {frozenset((first, second))}
        network.ranks[first].suspect(second, EVIDENCE, "broke")
        network.ranks[second].suspect(first, EVIDENCE, "broke")
        for rank in draws.sample(range(4), 4):
            network.ranks[rank].report(None)
        network.drain(draws)
        left = [one.members for one in network.ranks if not one.refusal]
        assert len(left) == 3, seed
        assert len(set(left)) == 1, seed
        assert len(left[0]) == 3, seed


def play(seed: int) -> None:
    """Ranks end at random moments, one after the other, and the others learn of it one by one, on their own."""
    draws = random.Random(seed)
    size = draws.randint(3, 8)
    network = Network(size)
    losses = draws.randint(1, min(3, size - 1))
    # What is still to happen, in any order: others' knowledge of a loss, and reports of epochs.
    known: list[tuple[int, int]] = []
    reported = dict.fromkeys(range(size), 0)
    while True:
        actions: list[Any] = [("deliver", pair) for pair in network.ready()]
        actions += [("know", pair) for pair in known if pair[0] not in network.dead]
        if losses and (draws.random() < 0.05 or not actions):
            victim = draws.choice([one.rank for one in network.living])
            network.kill(victim, draws)
            known += [(one.rank, victim) for one in network.living]
            losses -= 1
            continue
        # Whoever waits for a member that is lost comes to the end of the epoch.
        for one in network.living:
            ends = one.is_changing or any(rank in network.dead for rank in one.members)
            if reported[one.rank] < one.epoch and ends and draws.random() < 0.3:
                reported[one.rank] = one.epoch
                actions.append(("report", one.rank))
        if not actions:
            late = [one for one in network.living if reported[one.rank] < one.epoch and one.is_changing]
            if late:
                continue
            if any(rank in network.dead for one in network.living for rank in one.members):
                continue
            break
        what, about = draws.choice(actions)
        for kind, rank in actions:
            if kind == "report":
                network.ranks[rank].report([rank, network.ranks[rank].epoch])
        if what == "deliver" and network.waiting[about]:
            network.deliver(about)
        elif what == "know":
            known.remove(about)
            # Its connection ends after what it had sent.
            while network.waiting.get((about[1], about[0])):
                network.deliver((about[1], about[0]))
            network.ranks[about[0]].suspect(about[1], EVIDENCE, "gone")
    living = network.living
    assert len({(one.epoch, one.members) for one in living}) == 1, seed
    assert set(living[0].members) == {one.rank for one in living}, seed
    by_epoch: dict[int, set[tuple[int, ...]]] = {}
    for one in network.ranks:
        for decision in one.ended.values():
            by_epoch.setdefault(decision.epoch, set()).add(decision.members)
            assert set(decision.reports) == set(decision.members)
    assert all(len(found) == 1 for found in by_epoch.values()), seed
    for one in living:
        assert [each.epoch for each in one.ended.values()] == list(range(2, one.epoch + 1))


@pytest.mark.parametrize("first", [0])
def test_random_losses(first: int) -> None:
    """Members never differ within an epoch, and all survivors come to the last one."""
    for seed in range(first, first + 400):
        play(seed)


def test_a_process_whose_sponsor_is_lost_ends_no_further_epoch() -> None:
    """Nobody else can answer it: it asks another member. Its wish may come late, too."""
    for early in (True, False):
        network, draws = Network(3), random.Random(4)
        about = {"key": "new", "sponsor": 2, "address": ["host", 1]}
        if early:
            for one in network.ranks[:2]:
                one.invite("new", about)
        network.kill(2, draws)
        for one in network.living:
            one.suspect(2, EVIDENCE, "gone")
            one.report({"address": ["host", 0]})
        network.drain(draws)
        if not early:
            network.ranks[1].invite("new", about)
        assert [(one.epoch, one.members, one.is_changing) for one in network.living] == [(2, (0, 1), False)] * 2


@pytest.mark.parametrize("kind", [SILENCE, EVIDENCE])
def test_a_rank_that_alone_takes_the_leader_for_lost_comes_back(kind: str) -> None:
    """Otherwise both would lead, and refuse each other's ballots for ever."""
    for seed in range(20):
        network, draws = Network(4), random.Random(seed)
        network.ranks[1].suspect(0, kind, "no word")
        for rank in draws.sample(range(4), 4):
            network.ranks[rank].report(None)
        for _ in range(1000):
            if not (ready := network.ready()):
                break
            network.deliver(draws.choice(ready))
        assert [(one.epoch, one.members) for one in network.ranks] == [(2, (0, 1, 2, 3))] * 4, seed


def test_a_leader_that_is_cut_off_decides_nothing_alone() -> None:
    """Its proposal has not come to the others, which are more than half and decide something else."""
    network, draws = Network(5), random.Random(0)
    network.kill(4, draws)
    for one in network.living:
        one.suspect(4, EVIDENCE, "gone")
        one.report(None)
    while network.ranks[0]._accepted is None:
        network.deliver(draws.choice(network.ready()))
    network.cut = {frozenset((0, rank)) for rank in (1, 2, 3)}
    for rank in (1, 2, 3):
        network.ranks[0].suspect(rank, SILENCE, "no word")
        network.ranks[rank].suspect(0, SILENCE, "no word")
    network.drain(draws)
    assert [one.epoch for one in network.living] == [1, 2, 2, 2]
    assert "ranks 1, 2, 3, and ranks 0 are not more than half of 5" in network.ranks[0].refusal
    assert {one.members for one in network.living[1:]} == {(1, 2, 3)}


def carry(network: Network, *pairs: tuple[int, int]) -> None:
    """Delivers all that waits between ranks, in this order."""
    for pair in pairs:
        while network.waiting.get(pair):
            network.deliver(pair)


def test_a_proposal_of_a_few_is_not_made_again_beside_a_decision() -> None:
    """Rank 0 has proposed all three, which nobody else has heard. The others leave it out, and one of them ends."""
    network = Network(3)
    for one in network.ranks:
        one.report(None)
    carry(network, (1, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 1), (1, 0), (2, 0))
    assert network.ranks[0]._accepted is not None
    for rank in (2, 1):
        network.ranks[rank].suspect(0, SILENCE, "no word")
    carry(network, *[(1, 2), (2, 1)] * 3)
    assert [one.members for one in network.ranks[1:]] == [(1, 2)] * 2
    network.ranks[0].suspect(2, EVIDENCE, "gone")
    network.ranks[0].suspect(1, SILENCE, "no word")
    assert network.ranks[0].ended == {}
    assert "ranks 1" in network.ranks[0].refusal


@pytest.mark.parametrize("majority", [False, True])
def test_two_halves_do_not_both_make_a_proposal_again(majority: bool) -> None:
    """Each half has a rank that had accepted something else before."""
    network = Network(4, Quota(majority=majority))
    network.ranks[0].suspect(2, SILENCE, "no word")
    for one in network.ranks:
        one.report(None)
    carry(network, *[(src, dst) for src in (1, 2, 3) for dst in range(4) if dst != src])
    carry(network, (0, 1), (0, 2), (0, 3), (1, 0), (3, 0))
    for rank in (1, 2, 3):
        network.ranks[rank].suspect(0, SILENCE, "no word")
    carry(network, (1, 2), (2, 1), (1, 3), (3, 1))
    assert [one._accepted is not None for one in network.ranks[:2]] == [True, True]
    network.ranks[0].suspect(1, SILENCE, "no word")
    carry(network, *[(0, 3), (3, 0)] * 3)
    network.ranks[1].suspect(3, SILENCE, "no word")
    carry(network, *[(1, 2), (2, 1)] * 4)
    taken = {census.members for one in network.ranks for census in one.ended.values()}
    assert len(taken) <= 1


def test_nobody_joins_where_a_silent_rank_is_left_out() -> None:
    """It waits for the epoch that follows: alone it could go on beside those that were left out and live."""
    network, draws = Network(3), random.Random(0)
    about = {"sponsor": 0, "address": ["here", 1]}
    network.cut = {frozenset((2, rank)) for rank in (0, 1)}
    for rank in (0, 1):
        network.ranks[rank].invite("x", about)
        network.ranks[rank].suspect(2, SILENCE, "no word")
        network.ranks[rank].report({"address": ["there", rank]})
    network.drain(draws)
    assert [one.members for one in network.ranks[:2]] == [(0, 1)] * 2
    assert all(one.is_changing for one in network.ranks[:2])
    for rank in (0, 1):
        network.ranks[rank].report({"address": ["there", rank]})
    network.drain(draws)
    assert [one.members for one in network.ranks[:2]] == [(0, 1, 3)] * 2


def test_an_older_question_does_not_replace_a_newer_one() -> None:
    one = Agreement(2, range(3), lambda dst, letter: None, Quota())
    for ballot in ([5, 1], [3, 1]):
        one.hear(1, {"epoch": 1, "what": "prepare", "ballot": ballot})
    assert one._questions[1]["ballot"] == [5, 1]


def test_a_clock_that_goes_back_begins_a_wait_anew() -> None:
    one = Agreement(0, range(2), lambda dst, letter: None, Quota())
    one.report(None)
    for now in (1000.0, 0.0, 5.0):
        one.suspect_late(now, 10.0, "late")
        assert not one.suspicions
    one.suspect_late(10.5, 10.0, "late")
    assert list(one.suspicions) == [1]


def test_a_rank_that_refuted_a_suspicion_may_be_lost_later() -> None:
    """In a vote, where a suspicion that is known already does not count again."""
    sent: list[Any] = []
    votes = Votes(1, range(3), lambda dst, letter: sent.append(letter), Quota(), 1)
    silence = Suspicion(SILENCE, "no word")
    votes.suspect({0: silence})
    votes.give(3)
    votes.hear(0, {"epoch": 1, "letter": {"epoch": 1, "what": "prepare", "ballot": [1, 0]}})
    assert not votes._agreement.suspicions
    votes.suspect({0: silence})
    assert not votes._agreement.suspicions
    votes.find_silent(0, "no word")
    assert list(votes._agreement.suspicions) == [0]


def test_a_refusal_ends_nobody_who_is_not_counted_on() -> None:
    """Rank 0 takes the others for silent, which hear it, and are enough without it."""
    network, draws = Network(3), random.Random(0)
    for rank in (1, 2):
        network.ranks[0].suspect(rank, SILENCE, "no word")
    network.ranks[0].report(None)
    network.drain(draws)
    assert network.ranks[0].refusal
    assert [one.refusal for one in network.ranks[1:]] == ["", ""]


def test_random_schedules() -> None:
    """More: `python -m tests.comm.membership.agreement_fuzz --schedules 20000`."""
    assert faults(range(60)) == {}


@pytest.mark.slow
def test_many_random_schedules() -> None:
    assert main(["--schedules", "2000", "--seed", "1000"]) == 0
