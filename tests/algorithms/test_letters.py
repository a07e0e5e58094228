"""Letters with which ranks follow each other's rounds: of those that have come, a rank keeps the last of each other rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bagua_kernels.algorithms.models.catch_up import CatchUp
from bagua_kernels.algorithms.models.letters import Letters
from bagua_kernels.comm import Communicator, Schedule, open_mailbox, run_ranks
from tests import limits

MANY = 50


def test_a_rank_at_a_call_keeps_the_last_letter_of_those_that_went_on() -> None:
    """It counts once this rank has gone on, too."""
    schedule = Schedule(0)

    def rank(communicator: Communicator) -> None:
        letters = Letters(open_mailbox(communicator))
        letters.arrive("join", 3, 3)
        if communicator.rank:
            assert letters.wait_for_more(3, 3) is None
            letters.leave()
            for number in range(MANY):
                letters.tell(4 + number, 4 + number)
            letters.arrive("close()", 3 + MANY, 3 + MANY)
            assert letters.wait_for_more(3 + MANY, 3 + MANY) is None
            return
        schedule.sleep(10.0)
        assert letters.wait_for_more(3, 3) is None
        letters.keep_last()
        assert [len(peer.later) for peer in letters._peers.values()] == [2, 2]  # a round, and the next call
        letters.leave()
        letters.arrive("close()", 3, 3)
        assert letters.wait_for_more(3, 3) == (3 + MANY, 3 + MANY)
        assert letters.wait_for_more(3 + MANY, 3 + MANY) is None

    run_ranks(3, rank, timeout=limits.NEVER, schedule=schedule)


def test_a_rank_that_never_waits_reads_its_letters_in_each_round() -> None:
    """Others announce the rounds in which they wait for it; none of them stays in its mailbox."""
    schedule = Schedule(0)

    def rank(communicator: Communicator) -> None:
        box = open_mailbox(communicator)
        if communicator.rank:
            letters = Letters(box)
            for number in range(MANY):
                letters.tell(number, number)
            return
        rounds: Any = SimpleNamespace(local=SimpleNamespace(mailbox=box), known=0)
        catch_up = CatchUp(rounds)
        schedule.sleep(10.0)
        catch_up.check_written()
        assert box.take(0.0) is None
        assert catch_up._letters is not None
        assert [peer.rounds for peer in catch_up._letters._peers.values()] == [MANY - 1] * 2

    run_ranks(3, rank, timeout=limits.NEVER, schedule=schedule)
