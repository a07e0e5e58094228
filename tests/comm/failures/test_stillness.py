"""A timeout counts from when something last moved: here, or at the ranks that are waited for; with a clock of our own."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bagua_kernels.comm.backends.torch_distributed.gloo_bytes import bytes_through
from bagua_kernels.comm.failures import session_work
from bagua_kernels.comm.failures.diagnose import FailedOperation
from bagua_kernels.comm.failures.failure import Diagnosis
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.records import Records
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.failures.stillness import ELSEWHERE, Stillness, Stir
from bagua_kernels.comm.joining.evidence import Process
from bagua_kernels.errors import CollectiveTimeoutError
from tests import limits
from tests.clocks import VirtualClock

TIMEOUT, BEAT = 10.0, 0.5


class Moving:
    """An operation that ends at a time, of which bytes move until a time; what others do is called at each look."""

    def __init__(self, clock: VirtualClock, end: float, moves_until: float, others: Callable[[float], None]) -> None:
        self.clock, self.end, self.moves_until, self.others = clock, end, moves_until, others
        self.moved = 0

    def is_completed(self) -> bool:
        return self.clock.now >= self.end

    def wait(self, limit: timedelta) -> None:
        self.clock.sleep(min(limit.total_seconds(), max(0.0, self.end - self.clock.now)))
        self.moved = 1000 * int(min(self.clock.now, self.moves_until))
        self.others(self.clock.now)
        if not self.is_completed():
            raise RuntimeError("still under way")


class Ranks:
    """The signs of life of four ranks; rank 0 waits in an operation of the first two."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, store = clock, Records(4, clock.monotonic)
        self.all = [
            Liveness(
                store,
                rank,
                4,
                heartbeat=BEAT,
                clock=clock.monotonic,
                background=False,
                process=Process("", 1 + rank, 0),
            )
            for rank in range(4)
        ]
        self.session = Session("pair", TIMEOUT, 0, (0, 1), self.all[0])
        self.all[1].entered("pair", 0, "all_reduce")
        self.beaten = 0.0

    def beat(self, now: float) -> None:
        while self.beaten + BEAT <= now:
            self.beaten += BEAT
            for rank in reversed(self.all):
                rank.observe()
                rank.beat()


def wait(
    monkeypatch: pytest.MonkeyPatch, end: float, moves_until: float, other: Callable[[Ranks, float], None]
) -> tuple[float, str]:
    """Returns when the wait has ended, and the progress that its error tells; empty if it ended well."""
    clock = VirtualClock()
    monkeypatch.setattr(session_work, "time", clock)
    ranks, told = Ranks(clock), []

    def failure(*_: object, progress: str = "", **__: object) -> CollectiveTimeoutError:
        told.append(progress or "nothing")
        return CollectiveTimeoutError("it is over", (1,))

    def others(now: float) -> None:
        other(ranks, now)
        ranks.beat(now)

    monkeypatch.setattr(ranks.session, "failure", failure)
    handle = Moving(clock, end, moves_until, others)
    work = SessionWork(ranks.session, handle, "all_reduce", ranks.session.enter("all_reduce"), None, None, None)
    try:
        work.wait()
    except CollectiveTimeoutError:
        return clock.now, told[0]
    return clock.now, ""


class Bytes:
    def __init__(self) -> None:
        self.count = 0

    def moved(self) -> int:
        return self.count


def nothing(ranks: Ranks, now: float) -> None:
    """The ranks are there, and that is all."""


def test_bytes_that_move_put_the_end_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange may take many timeouts."""
    assert wait(monkeypatch, 100.0, math.inf, nothing) == (100.0, "")


def test_the_timeout_counts_from_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells how much has come until then, and how fast."""
    at, told = wait(monkeypatch, math.inf, 40.0, nothing)
    assert 40 + TIMEOUT - 2 * BEAT <= at < 40 + TIMEOUT + 1
    assert told.startswith("40 kB of it came or went here in 40.0 s, at 0.008 Mbit/s, then nothing for ")


def test_signs_of_life_alone_put_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    at, told = wait(monkeypatch, math.inf, 0.0, nothing)
    assert at <= TIMEOUT
    assert told == "nothing"


@pytest.mark.parametrize("who", ["partner", "behind the partner", "two behind"])
def test_bytes_along_the_chain_of_waiting_put_the_end_off(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sends nothing here while it sends to rank 2, or waits for that one, which sends to rank 3."""
    count = Bytes()

    def other(ranks: Ranks, now: float) -> None:
        chain = ["partner", "behind the partner", "two behind"].index(who)
        for rank in range(1, 1 + chain):
            ranks.all[rank].waits(f"others {rank}", rank + 1)
        ranks.all[1 + chain].follow(count)
        count.count = int(1000 * now)

    assert wait(monkeypatch, 100.0, 0.0, other) == (100.0, "")


@pytest.mark.parametrize("entered", [True, False])
def test_a_rank_that_trains_with_others_puts_nothing_off(entered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves bytes for ever, in ever more operations, of which this is none."""
    count = Bytes()

    def other(ranks: Ranks, now: float) -> None:
        ranks.all[1].follow(count)
        if not entered:
            ranks.all[1]._progress.pop("pair", None)
        count.count = int(1000 * now)
        ranks.all[1].begun = int(20 * now)

    at, told = wait(monkeypatch, math.inf, 0.0, other)
    assert at <= TIMEOUT
    assert told == "nothing"


def test_a_few_operations_elsewhere_count() -> None:
    """Those of a rank that is on its way here; with one more than that nothing of it has counted."""
    still = Stillness(0.0)
    for number in range(ELSEWHERE + 1):
        still.other(1, Stir(number, number), float(number))
    assert still.since() == ELSEWHERE
    still.other(1, Stir(-1, ELSEWHERE + 1), 100.0)
    assert still.since() == 0.0
    # The operation itself has moved: from then on anew.
    still.own(5, 200.0)
    still.other(1, Stir(-2, ELSEWHERE + 2), 300.0)
    assert still.since() == 300.0


def test_steps_towards_the_operation_count() -> None:
    """A rank that is in an earlier operation of the same communicator comes nearer with each."""
    clock = VirtualClock()
    ranks = Ranks(clock)
    still = Stillness(0.0)
    for number in range(3 * ELSEWHERE):
        ranks.all[1].entered("pair", number, "broadcast")
        ranks.all[1].begun = 1 + number
        clock.now += BEAT
        ranks.beat(clock.now)
        ranks.session.look(still, None, 0, clock.now)
    assert clock.now - still.since() <= TIMEOUT / 2 + 2 * BEAT  # no heartbeat is read before that


def test_bytes_through_sockets_of_a_library() -> None:
    """The system counts them; a descriptor that is something else by now counts for nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            found = {each.fileno(): os.fstat(each.fileno()).st_ino for each in (ours, theirs)}
            before = bytes_through(found)
            ours.sendall(bytes(1000))
            got = 0
            while got < 1000:
                got += len(theirs.recv(1000))
            limits.until(lambda: bytes_through(found) - before >= 2000, "the bytes are counted on both sides")
            assert bytes_through(dict.fromkeys(found, -1)) == 0
            assert ours.fileno() >= 0
        ours.sendall(b"x")  # it is still open


class Breaking(Records):
    """A store whose connection can break."""

    def __init__(self) -> None:
        super().__init__(2)
        self.broken = threading.Event()
        self.lets = threading.Event()
        self.tries = 0

    def beat(self, *arguments: Any) -> Any:
        if self.broken.is_set():
            raise RuntimeError("its connection broke")
        return super().beat(*arguments)

    def reconnect(self) -> None:
        self.tries += 1
        if not self.lets.is_set():
            raise ConnectionRefusedError("not yet")
        self.broken.clear()


def test_a_rank_comes_back_to_the_signs_of_life(caplog: pytest.LogCaptureFixture) -> None:
    """As often as it takes; meanwhile nobody is blamed because of that, and the log tells of it."""
    store = Breaking()
    other = Liveness(store, 0, 2, heartbeat=0.02, background=False, process=Process("", 1, 0))
    mine = Liveness(store, 1, 2, heartbeat=0.02, reconnect=store.reconnect)
    try:
        limits.until(lambda: mine._board.complete, "both are there")
        store.broken.set()
        limits.until(lambda: store.tries >= 2, "it tries again")
        long_after = mine.clock() + 100
        case = FailedOperation("world", (0, 1), 0, "all_reduce", long_after, timed_out=True, still=long_after)
        assert mine.diagnosis(case) is None or mine.diagnosis(case).kind == "unknown"  # type: ignore[union-attr]
        store.lets.set()
        limits.until(lambda: mine._trouble is None, "it is back")
        beats = mine._beats
        limits.until(lambda: mine._beats > beats + 2, "its heart beats")
    finally:
        store.broken.clear()
        mine.stop("the test is over")
        other.stop("the test is over")
    assert "had no connection to the heartbeat store" in caplog.text


def test_what_a_rank_sends_without_signs_of_life_speaks_for_it() -> None:
    """Rank 2 lost its way to the store long before rank 1 stopped."""
    clock = VirtualClock()
    ranks = Ranks(clock)
    for liveness in ranks.all[:3]:
        liveness.entered("world", 7, "all_reduce")
    for step in range(40):
        clock.now += BEAT
        for liveness in ranks.all:
            liveness.inquire()
            if (liveness.rank != 2 or step < 3) and (liveness.rank != 1 or step < 20):
                liveness.beat()
    heard = {1: 20 * BEAT, 2: 20 * BEAT, 3: 20 * BEAT}
    case = FailedOperation("world", range(4), 7, "all_reduce", clock.now, timed_out=True, heard=heard)
    diagnosis = ranks.all[0].diagnosis(case)
    assert isinstance(diagnosis, Diagnosis)
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (1,))
