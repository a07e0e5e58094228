"""Who is named when ranks die, stall or stay away: with a clock of our own, and with real processes."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.failures.diagnose import FailedOperation, Trouble
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.records import Records
from bagua_kernels.comm.joining.evidence import Process
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits

BEAT = 1.0


class Ranks:
    """Signs of life of some ranks over one store, with a clock that stands still between beats."""

    def __init__(self, size: int, processes: dict[int, Process] | None = None) -> None:
        """Starts ranks that have each given one sign, on hosts of their own unless `processes` are given."""
        self.look: Callable[[Liveness], object] = Liveness.inquire  # that each rank takes at the others before it beats
        self.now = 100.0
        self.store = Records(size, lambda: self.now)
        self.ranks = [
            Liveness(
                self.store, r, size, heartbeat=BEAT, clock=lambda: self.now, background=False,
                process=(processes or {}).get(r, Process("", 1 + r, 0)),
            )
            for r in range(size)
        ]  # fmt: skip

    def beat(self, times: int, without: tuple[int, ...] = ()) -> None:
        """Lets time pass: all ranks but some give signs of life."""
        for _ in range(times):
            self.now += BEAT
            for rank in self.ranks:
                if rank.rank not in without:
                    self.look(rank)
                    rank.beat()

    def enter(self, number: int, operation: str, *ranks: int) -> None:
        """Lets ranks enter an operation of the communicator "world"."""
        for rank in ranks:
            self.ranks[rank].entered("world", number, operation)

    def diagnosis(self, rank: int, number: int, since: float, timed_out: bool = False) -> Any:
        """What a rank makes of a failed all_reduce."""
        members = range(len(self.ranks))
        return self.ranks[rank].diagnosis(FailedOperation("world", members, number, "all_reduce", since, timed_out))


def test_silent_rank_is_lost() -> None:
    """Six beats without a sign are needed, and the last operation is told."""
    ranks = Ranks(3)
    ranks.enter(7, "all_reduce", 0, 1, 2)
    ranks.beat(3)
    since = ranks.now
    ranks.beat(5, without=(2,))
    assert ranks.diagnosis(0, 7, since) is None
    ranks.beat(3, without=(2,))
    diagnosis = ranks.diagnosis(0, 7, since)
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (2,))
    assert "in all_reduce #7" in diagnosis.text


def test_rank_that_has_not_entered_is_late() -> None:
    """A live rank that is behind is named."""
    ranks = Ranks(3)
    ranks.enter(7, "all_reduce", 0)
    ranks.enter(6, "broadcast", 1)
    ranks.enter(6, "all_gather", 2)
    ranks.ranks[2].finished("world", 6)
    ranks.beat(3)
    diagnosis = ranks.diagnosis(0, 7, ranks.now, timed_out=True)
    assert (diagnosis.kind, diagnosis.ranks) == ("late", (1, 2))
    assert "in broadcast #6" in diagnosis.text
    assert "after all_gather #6" in diagnosis.text


def test_ranks_that_wait_for_one_another_are_a_connection_at_a_stand() -> None:
    """A rank that is ahead of them by then names the two, rather than two that are late."""
    ranks = Ranks(3)
    ranks.enter(6, "all_reduce", 0, 1)
    ranks.enter(7, "all_reduce", 2)
    ranks.ranks[0].waits("world", 1)
    ranks.beat(3)
    assert ranks.diagnosis(2, 7, ranks.now, timed_out=True).kind == "late"
    ranks.ranks[1].waits("world", 0)
    ranks.beat(3)
    diagnosis = ranks.diagnosis(2, 7, ranks.now, timed_out=True)
    assert (diagnosis.kind, diagnosis.ranks) == ("stalled", (0, 1))
    assert "the connection between ranks 0 and 1" in diagnosis.text


def test_another_operation_of_the_same_number_is_a_mismatch() -> None:
    """Neither rank is late, and both calls are named."""
    ranks = Ranks(3)
    ranks.enter(7, "all_reduce", 0, 2)
    ranks.enter(7, "broadcast", 1)
    ranks.beat(3)
    diagnosis = ranks.diagnosis(0, 7, ranks.now, timed_out=True)
    assert (diagnosis.kind, diagnosis.ranks) == ("mismatch", (0, 1))
    assert diagnosis.text == "rank 0 called all_reduce; rank 1 called broadcast"


def test_nobody_is_blamed_where_all_have_entered() -> None:
    """A slow network is no rank's fault."""
    ranks = Ranks(2)
    ranks.enter(0, "all_reduce", 0, 1)
    ranks.beat(3)
    assert ranks.diagnosis(0, 0, ranks.now, timed_out=True).kind == "unknown"


def test_broken_connection_asks_for_a_beat_made_after_it() -> None:
    """A rank that died a moment ago looks alive, and must not count as late."""
    ranks = Ranks(2)
    ranks.enter(7, "all_reduce", 0)
    ranks.beat(3)
    since = ranks.now
    ranks.beat(1)
    assert ranks.diagnosis(0, 7, since) is None
    ranks.beat(1)
    assert ranks.diagnosis(0, 7, since).kind == "late"


def test_pause_of_the_observer_is_not_counted() -> None:
    """After a pause of this rank's own interpreter the others start anew."""
    ranks = Ranks(2)
    ranks.enter(7, "all_reduce", 0, 1)
    ranks.beat(2)
    since = ranks.now
    ranks.now += 60
    ranks.beat(1, without=(1,))
    for timed_out in (False, True):
        assert ranks.diagnosis(0, 7, since + 60, timed_out) is None
        # Of an operation that failed long before the pause it is time to say something, but nobody is to blame.
        assert ranks.diagnosis(0, 7, since, timed_out).ranks == ()
    ranks.beat(3)
    assert ranks.diagnosis(0, 7, since + 60).kind == "unknown"


def test_a_chain_of_receives_leads_to_its_end() -> None:
    """Rank 0 waits for 1, which waits for 2, which does something else; in a circle nobody is to blame."""
    ranks = Ranks(4)
    for rank, peer in ((0, 1), (1, 2)):
        ranks.ranks[rank].waits("world", peer)
    ranks.beat(3)

    def diagnosis() -> Any:
        return ranks.ranks[0].diagnosis(FailedOperation("world", (0, 1), None, "recv", ranks.now, True, (2, 3)))

    assert (diagnosis().kind, diagnosis().ranks) == ("late", (2,))
    ranks.ranks[2].waits("world", 0)
    ranks.beat(2)
    assert diagnosis().kind == "unknown"
    ranks.ranks[2].waits("world", None)
    ranks.beat(9, without=(2,))
    assert (diagnosis().kind, diagnosis().ranks) == ("lost", (2,))


@pytest.mark.parametrize("how", ["left", "fell silent"])
def test_a_rank_that_went_for_what_others_did_is_not_blamed(how: str) -> None:
    """It had reported another as lost before it went, and that one is named."""
    ranks = Ranks(4)
    ranks.beat(2)
    since = ranks.now
    ranks.enter(7, "all_reduce", 0, 1, 2, 3)
    ranks.beat(8, without=(1,))
    second = ranks.ranks[2]
    second._outgoing.append(second.diagnosis(FailedOperation("world", (1, 2), 7, "all_reduce", since, False)))
    second.beat()
    if how == "left":
        second.stop("its process exited after RankLostError")
    ranks.beat(1 if how == "left" else 8, without=(1, 2))
    diagnosis = ranks.ranks[0].diagnosis(FailedOperation("world", (0, 2), None, "recv", ranks.now, False))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.by) == ("lost", (1,), 2)


def test_first_report_wins() -> None:
    """A survivor that reports and leaves is not the culprit, and later diagnoses give way."""
    ranks = Ranks(3)
    ranks.enter(7, "all_reduce", 0, 1, 2)
    ranks.beat(2)
    since = ranks.now
    ranks.beat(8, without=(1,))
    first = ranks.ranks[0]
    first._outgoing.append(ranks.diagnosis(0, 7, since))
    first.beat()
    first.stop("its process exited after RankLostError")
    ranks.beat(1, without=(0, 1))
    diagnosis = ranks.diagnosis(2, 7, since)
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.by) == ("lost", (1,), 0)
    assert ranks.ranks[2].reported("world/0-2", (0, 2)) is None


def test_rank_that_left_or_closed_is_named_at_once() -> None:
    """Saying goodbye is no riddle."""
    ranks = Ranks(3)
    ranks.beat(2)
    ranks.ranks[1].stop("its process exited after KeyError: 'x'")
    ranks.beat(1, without=(1,))
    diagnosis = ranks.diagnosis(0, 0, ranks.now)
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (1,))
    assert "KeyError" in diagnosis.text
    ranks = Ranks(3)
    ranks.ranks[2].closed("world")
    ranks.beat(2)
    assert ranks.diagnosis(0, 0, ranks.now).kind == "closed"


def test_unreachable_store_names_its_host() -> None:
    """Nobody else can be asked."""
    ranks = Ranks(3)
    ranks.beat(2)
    ranks.ranks[1]._trouble = Trouble("connection reset")
    diagnosis = ranks.diagnosis(1, 0, ranks.now)
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (0,))
    # A store that does not answer: the call is under way for longer than six beats.
    ranks.ranks[2]._in_call_since = ranks.now
    since = ranks.now
    ranks.now += 5
    assert ranks.diagnosis(2, 0, since) is None
    ranks.now += 2
    assert ranks.diagnosis(2, 0, since).ranks == (0,)


def test_closed_communicators_do_not_pile_up() -> None:
    """A sign of life stays small."""
    ranks = Ranks(1)
    for i in range(1000):
        ranks.ranks[0].entered(f"world/{i}", 0, "barrier")
        ranks.ranks[0].closed(f"world/{i}")
    assert len(ranks.ranks[0]._progress) <= 32


def looping(timeout: float, sleeper: int = -1, raiser: int = -1) -> None:
    """All-reduces until somebody fails; tells which error came."""
    communicator = comm.init(timeout=limits.seconds(60))
    communicator.set_timeout(timeout)
    tensor = torch.ones(1000)
    step = 0
    try:
        while True:
            step += 1
            if step == 20:
                print("READY", flush=True)
                if communicator.rank == raiser:
                    raise KeyError("no such batch")
                if communicator.rank == sleeper:
                    time.sleep(limits.NEVER)
            communicator.all_reduce(tensor, comm.ReduceOp.AVG).wait()
            time.sleep(0.005)
    except CommunicationError as error:
        told = {"type": type(error).__name__, "ranks": getattr(error, "ranks", None), "text": str(error)}
        print("TOLD", json.dumps(told), flush=True)
        sys.exit(3)


def told(processes: Processes, rank: int, limit: float = 40.0) -> dict[str, Any]:
    """Waits for a survivor to end, and returns what it said."""
    (result,) = processes.wait(limits.seconds(limit), [rank])
    lines = [line for line in result.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, f"rank {rank} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    assert result.returncode == 3
    fields: dict[str, Any] = json.loads(lines[0].removeprefix("TOLD "))
    return fields


def survivors(size: int, culprit: int, act: Callable[[Processes], None], *args: float) -> list[dict[str, Any]]:
    """Starts ranks that all-reduce, acts on them once they do, and returns what all but the culprit say."""
    environment = {"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.25)}"}
    with Processes(looping, size, args=args, env=environment) as processes:
        for rank in range(size):
            processes.wait_for_output(rank, "READY", limits.seconds(60))
        act(processes)
        return [told(processes, rank) for rank in range(size) if rank != culprit]


@pytest.mark.parametrize(
    "culprit", [pytest.param(1, id="peer", marks=pytest.mark.slow), pytest.param(0, id="host_of_the_store")]
)
def test_killed_rank_is_named(culprit: int) -> None:
    """Whatever the timeout, also by the rank that is no neighbour of it in Gloo's ring."""
    for error in survivors(4, culprit, lambda p: p.send_signal(culprit, signal.SIGKILL), limits.NEVER):
        assert error["type"] == "RankLostError", error
        assert error["ranks"] == [culprit], error
        assert "all_reduce #" in error["text"]


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [pytest.param(1, id="peer"), pytest.param(0, id="host_of_the_store")])
def test_stopped_rank_is_named(culprit: int) -> None:
    """A rank that only stalls keeps its connections; the timeout ends the wait, and the silence gives it away."""
    for error in survivors(3, culprit, lambda p: p.send_signal(culprit, signal.SIGSTOP), limits.seconds(3)):
        assert error["type"] == "RankLostError", error
        assert error["ranks"] == [culprit], error


def test_rank_that_stays_away_is_named() -> None:
    """It answers, so it is late and not lost.

    A survivor that began well after the other one learns that from its report, before its own time is over.
    """
    timeout, own = limits.seconds(2), 0
    errors = survivors(3, 2, lambda p: None, timeout, 2)
    for rank, error in enumerate(errors):
        assert error["type"] == "CollectiveTimeoutError", error
        assert error["ranks"] == [2], error
        assert "after all_reduce #18" in error["text"]
        over = f"did not finish within {timeout:g} s, waiting for rank 2"
        told = f"cannot finish without rank 2 (reported by world rank {1 - rank})"
        assert (over in error["text"]) != (told in error["text"]), error
        own += over in error["text"]
    assert own, errors


@pytest.mark.slow
def test_rank_that_raises_is_named_with_its_exception() -> None:
    """The others learn why it left, whatever the timeout."""
    for error in survivors(3, 1, lambda p: None, limits.NEVER, -1, 1):
        assert error["type"] == "RankLostError", error
        assert error["ranks"] == [1], error
        assert "KeyError: 'no such batch'" in error["text"]
