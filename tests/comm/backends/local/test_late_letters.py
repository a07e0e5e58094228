"""Letters that take time, under a `Schedule`."""

from __future__ import annotations

import random

import pytest

from bagua_kernels.comm import Communicator, Schedule, open_mailbox, run_ranks
from tests.grids import grid


def uniform(draws: random.Random) -> float:
    return draws.uniform(0, 3)


def relay(c: Communicator, seen: list[bytes]) -> None:
    """Rank 0 writes to rank 2, then to rank 1, which writes to rank 2 as soon as it has read that."""
    mailbox = open_mailbox(c)
    if c.rank == 0:
        mailbox.post(2, b"first")
        mailbox.post(1, b"go")
    elif c.rank == 1:
        assert mailbox.take() == (0, b"go")
        mailbox.post(2, b"second")
    else:
        seen += [letter[1] for _ in range(2) if (letter := mailbox.take()) is not None]
    c.barrier().wait()
    mailbox.leave()


@pytest.mark.parametrize("late", [False, True])
def test_a_relayed_letter_may_overtake(late: bool) -> None:
    """Letters of different ranks arrive out of order only if they take time; then they do under some seed of 40."""
    overtaken = 0
    for seed in range(40):
        seen = list[bytes]()
        run_ranks(3, relay, seen, schedule=Schedule(seed, latency=uniform if late else None))
        assert sorted(seen) == [b"first", b"second"]
        overtaken += seen[0] == b"second"
    assert (0 < overtaken < 40) if late else not overtaken


@grid(cover=1, seed=range(10))
def test_letters_of_one_rank_stay_in_order(seed: int) -> None:
    """However long each takes, and whatever else arrives; the last arrives within the longest latency."""
    schedule = Schedule(seed, latency=uniform)

    def fn(c: Communicator) -> None:
        mailbox = open_mailbox(c)
        for number in range(10):
            for peer in range(3):
                if peer != c.rank:
                    mailbox.post(peer, bytes([number]))
        letters: dict[int, list[int]] = {}
        for _ in range(20):
            letter = mailbox.take()
            assert letter is not None
            letters.setdefault(letter[0], []).extend(letter[1])
        assert letters == {peer: list(range(10)) for peer in range(3) if peer != c.rank}
        assert 1 < schedule.now() <= 3
        c.barrier().wait()
        mailbox.leave()

    run_ranks(3, fn, schedule=schedule)


def test_a_letter_under_way_is_not_there() -> None:
    """`take` gives up at its timeout, and finds the letter when it has arrived."""
    schedule = Schedule(0, latency=lambda draws: 2.0)

    def fn(c: Communicator) -> None:
        mailbox = open_mailbox(c)
        if c.rank == 0:
            mailbox.post(1, b"late")
            mailbox.leave()  # what is under way arrives all the same
            schedule.sleep(10)
            return
        assert mailbox.take(0.0) is None
        assert mailbox.take(1.5) is None
        assert schedule.now() == 1.5
        assert mailbox.take(5.0) == (0, b"late")
        assert schedule.now() == 2.0
        mailbox.leave()

    run_ranks(2, fn, schedule=schedule)
