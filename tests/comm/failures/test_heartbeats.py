"""What the signs of life are worth: damaged ones, farewells, busy interpreters, and processes that are seen to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bagua_kernels.comm.failures.diagnose import FailedOperation, Trouble
from bagua_kernels.comm.failures.failure import Diagnosis
from bagua_kernels.comm.failures.heartbeat import Heartbeat, parse_report, report_to_json
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.records import FIELDS, Records
from bagua_kernels.comm.joining.evidence import Evidence, Process, _stat, _table
from tests import limits
from tests.comm.failures.test_liveness import Ranks
from tests.grids import folded

DAMAGED = [
    "",
    "{",
    "7",
    "[]",
    "null",
    "[" * 100_000,
    '{"kind": "lost"}',
    '{"kind": "lost", "ranks": [0], "text": "x", "communicator": "world"}',
    '{"kind": "lost", "ranks": 0, "text": "x", "communicator": "world", "by": 1}',
    '{"kind": "lost", "ranks": [99], "text": "x", "communicator": "world", "by": 1}',
    '{"kind": "lost", "ranks": [true], "text": "x", "communicator": "world", "by": 1}',
    '{"kind": "eaten", "ranks": [0], "text": "x", "communicator": "world", "by": 1}',
    '{"kind": "lost", "ranks": [0], "text": null, "communicator": "world", "by": 1}',
]  # fmt: skip
DAMAGED_FIELDS: list[dict[str, Any]] = [
    {"left": 1},
    {"doing/world": 3},
    {"doing/world": [3, "all_reduce", 1, ""]},
    {"waits": []},
    {"waits": {"world": "1"}},
    {"process": ["", -1, 0]},
    {"process": {"pid": 1}},
    {"begun": "7"},
    {"moved": [[]]},
    {"unknown": 0},
]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only waits, of which this one is the parent."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def of(pid: int) -> Process:
    """Returns a process by its number."""
    found = _stat(pid)
    assert found is not None
    return Process(_table(), pid, found[1])


def test_what_is_written_can_be_read() -> None:
    """By the reader that refuses everything else."""
    sign = Heartbeat("", {"world": (7, "all_reduce", False, "synchronize()")}, {"world": 2}, Process.current())
    assert Heartbeat.parse(json.loads(json.dumps(sign.to_fields()))) == sign
    report = Diagnosis("late", (1, 2), "they sleep", "world", 0)
    assert parse_report(report_to_json(report), 3) == report
    for wrong in (replace(report, ranks=(1, 3)), replace(report, by=3), replace(report, ranks=(-1,))):
        with pytest.raises(ValueError, match="numbers of ranks below 3"):
            parse_report(report_to_json(wrong), 3)


@folded(text=DAMAGED)
def test_damaged_reports_are_passed_over(text: str) -> None:
    """They end no rank's signs of life, and leave room for the reports that follow."""
    passes_over(text, {})


@folded(fields=DAMAGED_FIELDS)
def test_damaged_signs_are_passed_over(fields: dict[str, Any]) -> None:
    """They blame nobody."""
    passes_over("{", fields)


def passes_over(text: str, fields: dict[str, Any]) -> None:
    """Puts a report and fields of rank 2's heartbeat into the store, before rank 2 falls silent."""
    ranks = Ranks(3)
    ranks.enter(7, "all_reduce", 0, 1, 2)
    ranks.beat(3)
    ranks.store.compare_set("report/0", "", text)
    ranks.beat(1)
    since = ranks.now
    ranks.beat(1, without=(2,))
    ranks.store.beat(2, fields, -1, -1, 0, FIELDS)
    ranks.beat(9, without=(2,))
    diagnosis = ranks.diagnosis(0, 7, since)
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (2,))
    ranks.ranks[0]._outgoing.append(diagnosis)
    ranks.beat(2, without=(2,))
    assert ranks.ranks[1].reported("world", (0, 1, 2)) == diagnosis


def test_a_thread_that_fails_blames_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Not rank 0, above all."""

    class Broken(Records):
        beats = 0

        def beat(self, rank: int, *arguments: Any) -> Any:
            self.beats += rank == 1
            if self.beats == 3:
                raise KeyError("a fault of this process")
            return super().beat(rank, *arguments)

    store = Broken(3)
    others = [Liveness(store, rank, 3, heartbeat=0.02, background=False) for rank in (0, 2)]
    liveness = Liveness(store, 1, 3, heartbeat=0.02)
    assert liveness._thread is not None
    liveness._thread.join(limits.seconds(10))
    diagnosis = liveness.diagnose(
        FailedOperation("world", (0, 1, 2), 0, "all_reduce", liveness.clock(), timed_out=True)
    )
    assert (diagnosis.kind, diagnosis.ranks) == ("unknown", ())
    assert "a fault of this process" in diagnosis.text
    assert [other.rank for other in others] == [0, 2]
    assert "heartbeats of rank 1 have ended" in caplog.text


@pytest.mark.parametrize("busy_first", [False, True])
def test_a_busy_interpreter_is_not_taken_for_the_rank_that_died(busy_first: bool) -> None:
    """Both fall silent; one comes back. Without a look at their processes, that is what there is to go by."""
    ranks = Ranks(4)
    ranks.enter(7, "all_reduce", 0, 1, 2, 3)
    ranks.beat(3)
    if busy_first:
        ranks.beat(4, without=(1,))
    since, diagnosis = ranks.now, None
    for _ in range(8):
        ranks.beat(1, without=(1, 2))
        diagnosis = diagnosis or ranks.diagnosis(0, 7, since)
    for _ in range(5):
        ranks.beat(1, without=(2,))
        diagnosis = diagnosis or ranks.diagnosis(0, 7, since)
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (2,))


def test_the_transport_knows_which_of_the_silent_ones_broke() -> None:
    """Its word decides among them, and there is no need to wait."""
    ranks = Ranks(4)
    ranks.enter(7, "all_reduce", 0, 1, 2, 3)
    ranks.beat(3)
    since = ranks.now
    ranks.beat(8, without=(1, 2))
    case = FailedOperation("world", range(4), 7, "all_reduce", since, timed_out=False, broken=(2,))
    diagnosis = ranks.ranks[0].diagnosis(case)
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (2,))


def test_nobody_is_named_because_of_a_busy_interpreter_alone() -> None:
    """A process that is there keeps its connections: whoever broke one is somebody else, who is not silent yet."""
    ranks = Ranks(3, {0: Process.current(), 1: Process.current()})
    ranks.enter(7, "all_reduce", 0, 1, 2)
    ranks.beat(3)
    ranks.beat(5, without=(1,))
    since = ranks.now
    ranks.beat(2, without=(1, 2))
    assert ranks.diagnosis(0, 7, since) is None
    ranks.beat(6, without=(1, 2))
    assert ranks.diagnosis(0, 7, since).ranks == (2,)


@pytest.mark.parametrize("how", ["reported", "left"])
def test_a_message_fails_for_a_rank_that_neither_sends_nor_receives_it(how: str) -> None:
    """Rank 1 has gone: whoever waits for a busy rank 2 then gives up, but does not blame that."""
    ranks = Ranks(4)
    ranks.beat(3)
    if how == "reported":
        ranks.ranks[3]._outgoing.append(Diagnosis("lost", (1,), "its process has ended", "", 3))
    else:
        ranks.ranks[1].stop("its process exited after KeyError: 'x'")
    ranks.beat(4, without=(1,))
    case = FailedOperation("world", (0, 2), None, "recv", ranks.now, timed_out=False, beyond=(1, 3))
    diagnosis = ranks.ranks[0].diagnosis(case)
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (1,))


def test_the_end_of_the_store_names_its_host_to_those_who_wait_for_others() -> None:
    """They may have ended because of it, and what they reported went with it."""
    ranks = Ranks(4)
    ranks.beat(3)
    ranks.ranks[3]._trouble = Trouble("its process has ended")
    case = FailedOperation("world", (3, 2), None, "recv", ranks.now, timed_out=False, beyond=(0, 1), broken=(2,))
    diagnosis = ranks.ranks[3].diagnosis(case)
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.ranks) == ("lost", (0,))


def test_a_rank_that_leaves_does_not_call_the_others_late() -> None:
    """They are at work; it is itself that has no more to do."""
    store = Records(2)
    others = [Liveness(store, rank, 2, heartbeat=0.02) for rank in (0, 1)]
    others[0].entered("world", 0, "barrier")
    case = FailedOperation("world", (0, 1), 0, "barrier", others[0].clock(), timed_out=True)
    diagnosis = others[0].diagnose(case, leaving=True)
    assert (diagnosis.kind, diagnosis.ranks) == ("late", (1,))
    assert not reports(store)
    assert others[0].diagnose(case) == diagnosis
    assert reports(store)
    for other in reversed(others):
        other.stop("the test is over")


def test_the_host_of_the_store_stays_for_ranks_that_are_busy() -> None:
    """They read the last report when their interpreters are free again; nobody waits for the rank that was lost."""
    store = Records(3)
    host = Liveness(store, 0, 3, heartbeat=0.02)
    others = [Liveness(store, rank, 3, heartbeat=0.02, background=False) for rank in (1, 2)]
    others[0]._outgoing.append(Diagnosis("lost", (2,), "its process has ended", "", 1))
    others[0].beat()
    leaving = threading.Thread(target=host.stop, args=("its process exited",))
    leaving.start()
    leaving.join(0.3)  # fifteen heartbeats
    assert leaving.is_alive()
    store.add("left", 1)
    leaving.join(limits.seconds(3))
    assert not leaving.is_alive()


def test_nobody_judges_by_signs_before_the_reports_are_read() -> None:
    """Rank 1 reported rank 2 and left: a diagnosis in the middle of rank 0's beat does not blame it."""
    ranks = Ranks(3)
    ranks.beat(3)
    since, found = ranks.now, []

    class Watched(Records):
        def beat(self, *arguments: Any) -> Any:
            found.append(ranks.diagnosis(0, 7, since))
            answer = ranks.store.beat(*arguments)
            found.append(ranks.diagnosis(0, 7, since))
            return answer

    ranks.ranks[1]._outgoing.append(Diagnosis("lost", (2,), "it fell silent", "world", 1))
    ranks.ranks[1].beat()
    ranks.ranks[1].stop("its process exited")
    ranks.ranks[0]._board._store = Watched(3)
    ranks.beat(1, without=(1, 2))
    found.append(ranks.diagnosis(0, 7, since))
    assert {diagnosis.ranks for diagnosis in found if diagnosis is not None} == {(2,)}
    assert found[:2] == [None, None]


def test_process_that_ends_is_seen(child: subprocess.Popen[bytes]) -> None:
    """Also while nobody has asked how it ended; a later process of the same number is another one."""
    evidence = Evidence()
    evidence.add(1, of(child.pid))
    assert evidence.state(1) == "there"
    assert Process(_table(), child.pid, of(child.pid).started + 1).state() == "gone"
    assert Process("another host", child.pid, of(child.pid).started).state() == "unknown"
    assert evidence.state(2) == "unknown"
    child.send_signal(signal.SIGSTOP)
    until_state(evidence, "stopped")
    child.kill()
    until_state(evidence, "gone")
    child.wait()
    assert evidence.state(1) == "gone"


def until_state(evidence: Evidence, wanted: str) -> None:
    """Waits for what a signal does to the process of rank 1."""
    limits.until(lambda: evidence.state(1) == wanted, lambda: f"expected {wanted}, found {evidence.state(1)}", 10, 0.01)


def test_waiting_ranks_report_a_process_that_has_ended(child: subprocess.Popen[bytes]) -> None:
    """No connection broke and no time ran out: a forked child may hold the sockets."""
    ranks = Ranks(3, {0: Process.current(), 1: Process.current(), 2: of(child.pid)})
    ranks.look = Liveness.observe
    ranks.enter(7, "all_reduce", 0, 1, 2)
    ranks.beat(1)
    ranks.beat(20, without=(2,))
    assert ranks.ranks[1].reported("world", (0, 1, 2)) is None
    child.kill()
    child.wait()
    ranks.beat(3, without=(2,))
    for rank in (0, 1):
        diagnosis: Any = ranks.ranks[rank].reported("world", (0, 1, 2))
        assert (diagnosis.kind, diagnosis.ranks) == ("lost", (2,))
        assert f"pid {child.pid}" in diagnosis.text
        assert "in all_reduce #7 of communicator 'world'" in diagnosis.text
        assert ranks.ranks[rank].reported("world/0-1", (0, 1)) is None


def test_a_process_that_ends_after_its_farewell_is_not_reported(child: subprocess.Popen[bytes]) -> None:
    """What it did before is done; whoever waits for more hears of the farewell."""
    ranks = Ranks(2, {1: of(child.pid)})
    ranks.look = Liveness.observe
    ranks.beat(2)
    ranks.ranks[1].closed("world/sockets")
    ranks.ranks[1].stop("it closed its communicator")
    child.kill()
    child.wait()
    ranks.beat(1, without=(1,))
    assert not ranks.ranks[0].missed("world", (0, 1))
    ranks.beat(3, without=(1,))
    assert ranks.ranks[0].reported("world", (0, 1)) is None
    assert ranks.ranks[0].missed("world", (0, 1))
    assert not ranks.ranks[0].missed("world/sockets", (0, 1))


def test_a_farewell_in_the_middle_of_a_beat_is_told() -> None:
    """`stop` comes after the sign of this beat was written, and before the beat is over."""
    writing, go_on = threading.Event(), threading.Event()

    class Slow(Records):
        def beat(self, *arguments: Any) -> Any:
            answer = super().beat(*arguments)
            if threading.current_thread() is liveness_thread and not go_on.is_set():
                writing.set()
                go_on.wait(limits.seconds(10))
            return answer

    liveness_thread = None
    store = Slow(1)
    liveness = Liveness(store, 0, 1, heartbeat=0.05)
    liveness_thread = liveness._thread
    assert writing.wait(limits.seconds(10))
    stopping = threading.Thread(target=liveness.stop, args=("it has had enough",))
    stopping.start()
    while not liveness._left:
        pass
    go_on.set()
    stopping.join(limits.seconds(10))
    assert store.beat(0, None, -1, -1, 0, FIELDS)[2]["0"]["left"][0] == "it has had enough"


def reports(store: Records) -> list[str]:
    """Returns the reports in a store."""
    return store.beat(0, None, -1, -1, 0, FIELDS)[3]
