"""A mailbox of processes: a rank is killed, stopped or leaves in the middle, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError, RankLostError
from tests import limits
from tests.comm.backends.sockets.common import until
from tests.comm.hosts import on_hosts
from tests.comm.mailbox.cases import value

RANKS, VICTIM = 4, 1
TIMEOUT = limits.seconds(8)  # of which a quarter without an answer is silence: more than a rank on a busy machine takes
PATIENCE = 300  # seconds for processes that start or end
LIMIT = limits.seconds(PATIENCE)

pytestmark = pytest.mark.timeout(3 * PATIENCE)
N = 50_000


def ring(box: Mailbox, members: list[int], number: int) -> None:
    """One exchange with both neighbours among some ranks."""
    place = members.index(box.rank)
    left, right = members[place - 1], members[(place + 1) % len(members)]
    got = {peer: torch.empty(N, dtype=torch.float64) for peer in {left, right}}
    box.exchange(got, {peer: value(box.rank, peer, number, N) for peer in got}, number).wait()
    assert all(one.equal(value(peer, box.rank, number, N)) for peer, one in got.items())


def survive(leaves: bool) -> None:
    """One rank of four: exchanges around a ring until a rank is missed, then without it."""
    c = comm.init(timeout=LIMIT)
    box = comm.open_mailbox(c)
    everyone = list(range(RANKS))
    ring(box, everyone, 0)
    box.timeout = TIMEOUT
    c.close()
    comm.shutdown()
    print("GOING", flush=True)
    step = 0
    try:
        while True:
            step += 1
            if leaves and box.rank == VICTIM and step == 20:
                box.leave("it has had enough")
                return
            ring(box, everyone, step)
    except CommunicationError as error:
        told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
        print("RAISED", json.dumps(told), flush=True)
    # All have to hear of it before they can go on; this is what a letter is for.
    others = [rank for rank in everyone if rank not in (VICTIM, box.rank)]
    for rank in others:
        box.post(rank, b"missed")
    box.timeout = LIMIT
    for _ in others:
        assert box.take() is not None
    box.drop([VICTIM], below=1 << 40)
    for number in range(20):
        ring(box, [rank for rank in everyone if rank != VICTIM], (1 << 40) + number)
    assert VICTIM in box.lost()
    print("ENDED", flush=True)


FAULTS = [
    pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    pytest.param(signal.SIGSTOP, id="stopped"),
    pytest.param(None, id="leaves", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_survivors_go_on(fault: signal.Signals | None) -> None:
    """Every other rank hears which one is lost: also the one that is no neighbour of it."""
    with Processes(survive, RANKS, args=[fault is None]) as processes:
        for rank in range(RANKS):
            processes.wait_for_output(rank, "GOING", LIMIT)
        time.sleep(0.2)
        if fault is not None:
            processes.send_signal(VICTIM, fault)
        survivors = [rank for rank in range(RANKS) if rank != VICTIM]
        reason = {signal.SIGKILL: "its connection broke", signal.SIGSTOP: "nothing came from it"}
        for rank, result in zip(survivors, processes.wait(LIMIT, survivors), strict=True):
            assert result.returncode == 0, f"rank {rank}:\n{result.stdout}\n{result.stderr}"
            check(rank, result.stdout, reason.get(fault, "it left: it has had enough"))


def check(rank: int, output: str, reason: str) -> None:
    """A survivor has raised with the name of the lost rank and why it is lost, and gone on."""
    assert output.splitlines()[-1] == "ENDED", output
    raised = json.loads(output.split("RAISED ", 1)[1].splitlines()[0])
    assert f"rank {VICTIM} was lost ({reason}" in raised["text"], raised
    if rank in (VICTIM - 1, VICTIM + 1) or "nothing" in reason:
        assert (raised["kind"], raised["ranks"]) == ("RankLostError", [VICTIM]), raised


@pytest.mark.slow
def test_survivors_of_an_unplugged_rank_go_on() -> None:
    """Nothing comes from it any more; its own mailbox finds the others silent."""
    with on_hosts(survive, [False], RANKS) as hosts:
        hosts.wait_for_output("GOING", PATIENCE)
        time.sleep(0.2)
        hosts.unplug(VICTIM)
        for rank in (rank for rank in range(RANKS) if rank != VICTIM):
            check(rank, hosts.end(rank, PATIENCE), "nothing came from it")
        until(lambda: "RankLostError" in hosts.output(VICTIM))


def forking() -> None:
    """One rank of two: a child of rank 1 lives on, but cannot use the mailbox."""
    c = comm.init(timeout=limits.seconds(60))
    box = comm.open_mailbox(c)
    box.exchange({1 - c.rank: torch.empty(3)}, {1 - c.rank: torch.ones(3)}, 0).wait()
    c.close()
    comm.shutdown()
    if box.rank == 0:
        # By its connection: had the child a copy of that, only silence would give the parent away.
        with pytest.raises(RankLostError, match=r"rank 1 was lost \(its connection broke"):
            box.exchange({1: torch.empty(3)}, {}, 1).wait()
        print("ENDED", flush=True)
        return
    work = box.exchange({0: torch.empty(3)}, {}, 2)
    ready, written = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        for broken in (work.wait, box.take, lambda: box.post(0, b""), lambda: box.exchange({}, {0: torch.ones(1)}, 3)):
            with pytest.raises(CommunicationError, match="forked"):
                broken()
        box.leave()
        os.write(written, b"x")
        signal.pause()
    assert os.read(ready, 1) == b"x"
    box.post(0, b"the parent goes on")
    print("CHILD", child, "ENDS THE LINE", flush=True)
    signal.pause()


def test_forked_child_holds_no_connection() -> None:
    """The other rank misses a killed one whose child lives."""
    with Processes(forking, 2) as processes:
        processes.wait_for_output(1, "ENDS THE LINE", LIMIT)
        child = int(processes.output(1).split()[1])
        try:
            processes.send_signal(1, signal.SIGKILL)
            (result,) = processes.wait(LIMIT, [0])
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
    assert (result.returncode, result.stdout) == (0, "ENDED\n"), result.stderr


def exiting(how: str) -> None:
    """One rank of two: ends without leaving, in one of several ways, while the other one waits for it."""
    c = comm.init(timeout=LIMIT)
    box = comm.open_mailbox(c)
    box.exchange({1 - c.rank: torch.empty(3)}, {1 - c.rank: torch.ones(3)}, 0).wait()
    c.close()
    if c.rank == 0:
        with pytest.raises(RankLostError) as caught:
            box.exchange({1: torch.empty(3)}, {}, 1).wait()
        assert box.take(0.0) == (1, b"last words")
        print(caught.value, flush=True)
        return
    box.exchange({0: torch.empty(3)}, {}, 2)
    box.post(0, b"last words")
    if how == "raises":
        raise ValueError("boom")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "returns"])
def test_process_that_ends_leaves(how: str) -> None:
    """Its end is neither held up nor silent."""
    with Processes(exiting, 2, args=[how]) as processes:
        results = processes.wait(LIMIT)
    assert [result.returncode for result in results] == [0, int(how == "raises")], results[1].stderr
    assert "rank 1 was lost (it left: its mailbox was forgotten, or its process exits)" in results[0].stdout
    assert "Warning" not in results[0].stderr + results[1].stderr
