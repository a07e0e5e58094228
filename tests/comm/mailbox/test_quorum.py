"""Merges of a quorum: the same on all ranks, in any order of events, with ranks that are slow, few or lost."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, Schedule, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox import quorum as quorum_module
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.quorum import Quorum
from bagua_kernels.errors import CommunicationError, RankLostError
from tests import limits
from tests.comm.backends.sockets.common import leaving_nothing
from tests.comm.mailbox.common import over_sockets, schedules

Line = tuple[int, tuple[tuple[int, int], ...]]  # part, and the posts of a merge


@dataclass
class Case:
    """What a run is made of."""

    seed: int
    size: int
    count: int
    grace: float
    parts: int
    steps: list[int]
    pace: list[float]
    latency: float
    ends: dict[int, int] = field(default_factory=dict)  # rank: step at which it is lost
    breaks: int | None = None  # number of the letter with which the first leader is lost while it sends an entry

    @classmethod
    def draw(cls, seed: int, losses: bool = False) -> Case:
        draws = random.Random(seed)
        size = draws.randint(3 if losses else 2, 8)
        count = draws.randint(1, size - 1 if losses else size)
        steps = draws.choice([4, 10])
        case = cls(
            seed,
            size,
            count,
            draws.choice([0.0, 0.2, 2.0]),
            draws.choice([1, 1, 2, 3]),
            [steps if draws.random() < 0.6 else draws.randint(1, steps) for _ in range(size)],
            [draws.choice([1.0, 1.0, 1.0, 3.0]) for _ in range(size)],
            draws.choice([0.0, 0.5, 3.0]),
        )
        if losses:
            lost = draws.sample(range(size), draws.randint(1, size - count))
            # The first leader, and the second one, more often than others.
            lost = [rank if draws.random() < 0.5 or place in lost else place for place, rank in enumerate(lost)]
            case.ends = {rank: draws.randint(0, steps - 1) for rank in lost}
            if 0 in case.ends and draws.random() < 0.7:
                case.breaks = draws.randint(0, 3 * size)
        return case


@dataclass
class Result:
    """Of one rank that was not lost."""

    log: list[Line]
    posted: list[tuple[int, int]]
    left: list[int]


class LostError(Exception):
    """Ends a rank."""


def rank(communicator: Communicator, case: Case, sleep: Callable[[float], None]) -> Result | None:
    """Posts and waits as a trainer does."""
    me, draws = communicator.rank, random.Random(f"{case.seed} {communicator.rank}")
    mailbox = open_mailbox(communicator)
    courier = Courier(mailbox)
    if me == 0 and case.breaks is not None:
        _break(courier, case.breaks)
    log: list[Line] = []

    def merge(part: int, posts: Any) -> None:
        for post in posts:
            assert post.part == part
            assert post.payloads[0].tolist() == [post.rank, post.number, part]
            assert post.weight == post.number
        log.append((part, tuple((post.rank, post.number) for post in posts)))

    quorum = Quorum(
        courier, case.count, case.grace, buffers=lambda part: [torch.empty(3, dtype=torch.int64)], merge=merge
    )
    courier.start()
    posted, seen = [], dict.fromkeys(range(case.parts), 0)
    try:
        for step in range(case.steps[me]):
            sleep(case.pace[me] * draws.uniform(0.9, 1.1))
            if case.ends.get(me) == step and (case.breaks is None or me != 0):
                courier.end("it was lost")
                return None
            part = step % case.parts
            quorum.post(part, step, [torch.tensor([me, step, part])])
            posted.append((me, step))
            quorum.wait(part, seen[part])
            seen[part] = quorum.merges(part)
        left = quorum.rest(lambda: None)
    except CommunicationError:
        if me in case.ends:
            return None
        raise
    if case.ends:
        sleep(50.0)  # letters for others may be under way
    else:
        communicator.barrier().wait()
    courier.end()
    return Result(log, posted, left)


def _break(courier: Courier, letters: int) -> None:
    post, count = courier.post, 0

    def breaking(dst: int, kind: int, contents: bytes) -> None:
        nonlocal count
        if kind == quorum_module._ENTRY:
            if count == letters:
                courier.mailbox.leave("it was lost")
            count += 1
        post(dst, kind, contents)

    courier.post = breaking  # type: ignore[method-assign]


def check(case: Case, results: list[Result | None]) -> None:
    """Asserts what holds for any order of events."""
    left = {me: result for me, result in enumerate(results) if result is not None}
    log = next(iter(left.values())).log
    assert all(result.log == log for result in left.values()), "ranks have merged differently"
    merged = Counter(key for _, keys in log for key in keys)
    assert max(merged.values()) == 1, "a post counts twice"
    assert {key for result in left.values() for key in result.posted} <= set(merged), "a post is missing"
    for part, keys in log:
        assert list(keys) == sorted(keys)
        assert all(number % case.parts == part for _, number in keys)
    for me, part in itertools.product(left, range(case.parts)):
        numbers = [number for of, keys in log if of == part for rank, number in keys if rank == me]
        assert numbers == sorted(numbers)
    assert {tuple(result.left) for result in left.values()} == {tuple(sorted(left))} or set(left) < set(
        next(iter(left.values())).left
    )
    if not case.ends and len({*case.steps}) == 1 and (case.parts == 1 or case.count == case.size):
        for part in range(case.parts):
            merges = [keys for of, keys in log if of == part]
            # Before any rank rests, there is a merge for each of its posts.
            whole = merges[: len(range(part, case.steps[0], case.parts))]
            assert all(len({rank for rank, _ in keys}) >= case.count for keys in whole)
        if case.count == case.size:
            assert all(len(keys) == case.size for _, keys in log)


def scheduled(case: Case) -> None:
    schedule = Schedule(case.seed, latency=lambda draws: draws.uniform(0, case.latency))
    check(case, run_ranks(case.size, rank, case, schedule.sleep, timeout=200.0, schedule=schedule))


@schedules(200)
def test_random_schedules(seeds: range) -> None:
    for seed in seeds:
        scheduled(Case.draw(seed))


@schedules(200)
def test_random_schedules_with_losses(seeds: range) -> None:
    """Also of leaders, one after the other, and in the middle of an entry that some have got."""
    for seed in seeds:
        scheduled(Case.draw(seed, losses=True))


@pytest.mark.slow
def test_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.comm.mailbox.test_quorum.open_mailbox", over_sockets)
    for seed in range(10):
        case = Case.draw(seed)
        with leaving_nothing():
            check(case, run_ranks(case.size, rank, case, lambda seconds: time.sleep(seconds / 1000)))


@pytest.mark.parametrize("last", [True, False])
def test_a_rank_that_leaves_after_the_last_rest_is_not_lost(last: bool) -> None:
    """Rank 0 ends before rank 1 has told rank 2 that it rests; afterwards only training that goes on misses it."""

    def rank(communicator: Communicator) -> bool:
        mailbox = open_mailbox(communicator)
        courier = Courier(mailbox)
        quorum = Quorum(courier, 3, 0.0, buffers=lambda part: [torch.empty(3)], merge=lambda part, posts: None)
        post = courier.post

        def late(dst: int, kind: int, contents: bytes) -> None:
            if kind == quorum_module._REST and (communicator.rank, dst) == (1, 2):
                limits.until(lambda: 0 in courier.lost or 0 in mailbox.lost(), "rank 0 has left")
                time.sleep(0.2)  # in which the courier looks
            post(dst, kind, contents)

        courier.post = late  # type: ignore[method-assign]
        courier.start()
        assert quorum.rest(lambda: None, last=last) == [0, 1, 2]
        if communicator.rank == 0:
            courier.end()
            return True
        if not last:
            with pytest.raises(RankLostError):
                quorum.wait(0, 0)
            return True
        courier.check()
        courier.end()
        return True

    assert all(run_ranks(3, rank, timeout=20))
