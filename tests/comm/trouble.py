"""What ranks do to one another: give up, or come late."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator
from bagua_kernels.errors import CommunicationError, RankLostError
from tests import limits
from tests.comm.contract import case_neighbour_exchange, case_point_to_point


def abort_of_a_duplicate(c: Communicator) -> None:
    """Rank 0 of two gives up while both wait for something: itself for rank 1, and rank 1 for it."""
    pair = c.duplicate()
    # A wait that the abort does not end goes on until a limit ends the test.
    pair.set_timeout(limits.NEVER)
    if c.rank == 0:
        threading.Timer(0.5, pair.abort).start()
        with pytest.raises(CommunicationError, match="it was aborted"):
            pair.all_reduce(torch.ones(1)).wait()
        with pytest.raises(CommunicationError, match="it was aborted"):
            pair.barrier()
    else:
        with pytest.raises(RankLostError, match="rank 0 gave up: it was aborted") as caught:
            pair.recv(torch.ones(1), 0).wait()
        assert caught.value.ranks == (0,)
    c.barrier().wait()


def late_neighbour(c: Communicator) -> None:
    """Rank 1 comes late to each kind of operation; nobody minds, and the communicator goes on working."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    lateness = {"recv": 0.5, "polled recv": 0.5, "neighbour_exchange": 2.0, "all_reduce": 0.5}
    for kind, seconds in lateness.items():
        mine, got = torch.full((5,), float(c.rank)), torch.full((5,), -1.0)
        if c.rank == 1:
            time.sleep(seconds)
        if kind == "all_reduce":
            got.copy_(mine)
            c.all_reduce(got).wait()
            expected = sum(range(c.size))
        elif kind == "neighbour_exchange":
            c.neighbour_exchange({left: got}, {right: mine}).wait()
            expected = left
        elif c.rank == 1:
            c.send(mine, right).wait()
            continue
        elif c.rank == 2 % c.size:
            work = c.recv(got, 1)
            if kind == "polled recv":
                limits.until(work.is_completed, "the message has come", limit=10 + seconds, pause=0.001)
            work.wait()
            expected = 1
        else:
            continue
        assert got.tolist() == [float(expected)] * 5, (kind, got)
    for _ in range(3):
        case_point_to_point(c)
        case_neighbour_exchange(c)
        c.barrier().wait()


def failure_reaches_all_threads(c: Communicator) -> None:
    """Threads that wait for one work all raise when a rank gives up."""
    pair = c.duplicate()
    pair.barrier().wait()
    if c.rank == 0:
        pair.abort()
        c.barrier().wait()
        return
    works = [pair.all_reduce(torch.ones(8)), pair.recv(torch.ones(8), 0)]
    seen: list[BaseException | None] = []

    def wait(work: comm.Work) -> None:
        try:
            work.wait()
            seen.append(None)
        except BaseException as error:
            seen.append(error)

    threads = [threading.Thread(target=wait, args=(work,)) for work in works for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.seconds(20))
    assert len(seen) == 8
    assert all(isinstance(error, CommunicationError) for error in seen), seen
    c.barrier().wait()
