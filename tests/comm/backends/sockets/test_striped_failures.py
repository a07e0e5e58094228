"""A communicator over sockets of its own: how it ends, how it fails, and what must not make it fail."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.sockets import inbox as inbox_module
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, LinkError, MismatchError, RankLostError
from tests import limits
from tests.comm import contract, trouble
from tests.comm.backends.sockets.common import LIGHT, TIGHT, by_way, leaving_nothing, striped, until


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


def test_close() -> None:
    """Again is harmless; anything else says why it cannot be."""

    def fn(c: StripedCommunicator) -> None:
        other = c.duplicate()
        assert not other.is_ended()
        other.close()
        other.close()
        other.abort()
        assert other.is_ended()
        for call in (other.barrier, other.duplicate, lambda: other.all_reduce(torch.ones(1))):
            with pytest.raises(CommunicationError, match="it was closed"):
                call()
        c.barrier().wait()

    striped(3, fn)


@pytest.mark.parametrize("thread", [False, True])
def test_abort(thread: bool) -> None:
    """What is under way ends, here and on the other ranks, long before the timeout; others are not concerned."""

    def fn(c: StripedCommunicator) -> None:
        pair = c.duplicate()
        if c.rank == 0:
            works = [pair.recv(torch.ones(1), 1), pair.barrier()]
            timer = threading.Timer(0.1 if thread else 0, lambda: pair.abort("enough"))
            timer.start() if thread else pair.abort("enough")
            for work in works:
                with pytest.raises(CommunicationError, match="enough") as given_up:
                    work.wait()
                assert not isinstance(given_up.value, RankLostError)
            with pytest.raises(CommunicationError, match="enough"):
                pair.all_reduce(torch.ones(1))
        else:
            with pytest.raises(CommunicationError) as caught:
                pair.recv(torch.ones(100), 0).wait()
            assert not isinstance(caught.value, CollectiveTimeoutError)
            assert pair.is_ended()
        c.barrier().wait()

    striped(3, fn)


@pytest.mark.parametrize("size", [2, 3])
def test_late_neighbour(size: int) -> None:
    """A message may be late."""
    striped(size, trouble.late_neighbour)
    striped(size, trouble.failure_reaches_all_threads)


def test_different_operations() -> None:
    """Every rank gets an error, and who can see it says what was called."""
    told: list[str] = []

    def fn(c: StripedCommunicator) -> None:
        other = c.duplicate()
        with pytest.raises(CommunicationError) as caught:
            (other.all_reduce(torch.ones(2)) if c.rank else other.reduce(torch.ones(2))).wait()
        assert not isinstance(caught.value, CollectiveTimeoutError)
        told.append(str(caught.value))
        c.barrier().wait()

    striped(2, fn)
    assert any("called reduce of 8 bytes" in text and "called all_reduce of 8 bytes" in text for text in told), told


@pytest.mark.parametrize("way", ["direct", "ring", "doubling"])
def test_ranks_that_run_ahead(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One starts everything and then waits, the other waits for each before it starts the next."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 10_000)

    def fn(c: StripedCommunicator) -> None:
        x = [torch.full((6000,), float(i)) for i in range(8)]
        if c.rank:
            for work in [c.all_reduce(one) for one in x]:
                work.wait()
        else:
            for one in x:
                time.sleep(0.02)
                c.all_reduce(one).wait()
        assert [one.unique().tolist() for one in x] == [[2.0 * i] for i in range(8)]

    striped(2, fn, by_way(way), timeout=limits.seconds(3))


def test_tensors_of_inference_mode() -> None:
    """A validation loop averages its results."""

    def fn(c: StripedCommunicator) -> None:
        with torch.inference_mode():
            for n in (10, 10_000):
                x, wide, part = torch.ones(n), torch.zeros(2 * n), torch.zeros(n)
                c.all_reduce(x, ReduceOp.AVG).wait()
                c.all_gather(wide, x).wait()
                c.reduce_scatter(part, wide).wait()
                c.broadcast(x, 1).wait()
                c.reduce(part, 0).wait()
        assert wide.tolist() == [1.0] * 20_000

    striped(2, fn, Tuning(), timeout=limits.seconds(5))


def test_tags_that_differ_in_high_bits() -> None:
    """The largest ones are told apart, and what would not fit is refused."""

    def fn(c: StripedCommunicator) -> None:
        tags, peer = (3, 3 + (1 << 30), (1 << 31) - 1), 1 - c.rank
        with pytest.raises(ValueError, match="tag"):
            c.send(torch.ones(4), peer, tag=1 << 31)
        sends = [c.send(torch.full((4,), tag), peer, tag=tag) for tag in tags]
        for tag in reversed(tags):
            got = torch.zeros(4, dtype=torch.int64)
            c.recv(got, peer, tag=tag).wait()
            assert got.tolist() == [tag] * 4
        for send in sends:
            send.wait()

    striped(2, fn)


def over_gloo() -> None:
    """Ranks as processes: some of the contract, an abort, and an end without a farewell."""
    world = comm.init(timeout=limits.seconds(60))
    assert isinstance(world, StripedCommunicator)
    world.retune(TIGHT)
    for case in (*LIGHT, contract.case_large_all_reduce, contract.case_split):
        case(world)
    trouble.abort_of_a_duplicate(world)
    print("FINE", flush=True)


@pytest.mark.slow
def test_processes_over_gloo() -> None:
    """They find one another, fail as Gloo does, and end."""
    for result in run_processes(over_gloo, 2, timeout=limits.seconds(60)):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


def dying() -> None:
    """Rank 1 ends in the middle of everything."""
    world = comm.init(timeout=limits.seconds(60))
    world.barrier().wait()
    if world.rank == 1:
        os._exit(3)
    world.all_gather(torch.ones(20), torch.ones(10))
    with pytest.raises(RankLostError) as caught:
        world.all_reduce(torch.ones(100_000)).wait()
    assert caught.value.ranks == (1,)
    print("FINE", flush=True)
    os._exit(0)


def test_rank_that_dies_is_named() -> None:
    """By the ranks that are left."""
    results = run_processes(dying, 2, timeout=limits.seconds(60))
    assert (results[0].returncode, results[0].stdout) == (0, "FINE\n"), results[0].stderr
    assert results[1].returncode == 3


class Deaf:
    """An epoll object to which nothing comes from some sockets any more, whatever its loop does with them."""

    def __init__(self, epoll: Any, cut: list[int]) -> None:
        self._epoll, self._cut = epoll, set(cut)
        for fd in cut:
            epoll.unregister(fd)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def unregister(self, fd: int) -> None:
        if fd not in self._cut:
            self._epoll.unregister(fd)


def falling_out(how: str) -> None:
    """One rank of three; nobody is lost, but something does not fit, or a connection breaks."""
    c = comm.init(timeout=limits.seconds(4 if how == "silence" else 20))
    assert isinstance(c, StripedCommunicator)
    c.barrier().wait()
    try:
        if how == "silence":
            if c.rank < 2:
                assert c._loop is not None
                c._loop._epoll = Deaf(c._loop._epoll, [channel.fd for channel in c._loop._links[1 - c.rank]])  # type: ignore[assignment]
            # Nothing may come through before both have cut it: a rank that has it all is ahead, and finds the other one late.
            store = torch.distributed.distributed_c10d._get_default_store()
            store.add("cut", 1)
            until(lambda: store.add("cut", 0) == 3)
            # The third rank gets through the first one, and is ahead of the others then; its own time runs out after theirs.
            c.all_reduce(torch.ones(1000)).wait()
            time.sleep(limits.seconds(2))
            c.all_reduce(torch.ones(1000)).wait()
        if how == "sizes":
            c.all_reduce(torch.ones(2000 if c.rank == 2 else 1000)).wait()
        elif how == "ways":
            # So many bytes that the table has another way for them, whose messages do not meet.
            c.all_reduce(torch.ones(4_000_000 if c.rank == 2 else 1000)).wait()
        elif how == "message":
            if c.rank == 0:
                c.send(torch.ones(2000), 1).wait()
            elif c.rank == 1:
                c.recv(torch.ones(1000), 0).wait()
            c.barrier().wait()
        else:
            if c.rank == 0:
                assert c._loop is not None
                # One is enough: the loop may have closed the others before they could be taken down.
                next(iter(c._loop._links[1])).sock.shutdown(socket.SHUT_RDWR)
            c.all_reduce(torch.ones(1000)).wait()
    except CommunicationError as error:
        first = error
    for later in range(2):
        with pytest.raises(type(first)) as caught:
            c.session.guard(f"later {later}", throw)
        assert caught.value.ranks == first.ranks
    print(json.dumps([type(first).__name__, first.ranks, str(first)]), flush=True)


def throw() -> None:
    raise RuntimeError("broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "ranks", "texts"),
    [
        ("sizes", "MismatchError", [[0, 2], [1, 2]], ["8000 bytes", "4000 bytes", "model.join()"]),
        ("ways", "MismatchError", [[0, 2], [1, 2]], ["16000000 bytes", "4000 bytes", "model.join()"]),
        ("message", "MismatchError", [[0, 1]], ["sent 8000 bytes", "expected 4000"]),
        ("link", "LinkError", [[0, 1]], ["connection between ranks 0 and 1"]),
        (
            *("silence", "CollectiveTimeoutError", [[0, 1]]),
            ["nothing came through the connection between ranks 0 and 1"],
        ),
    ],
)
def test_nobody_is_lost(how: str, kind: str, ranks: list[list[int]], texts: list[str]) -> None:
    """All ranks hear what does not fit, with both sizes, or which connection broke, and that no rank is to blame."""
    for result in run_processes(falling_out, 3, args=[how], timeout=limits.seconds(60)):
        assert result.stdout, result.stderr
        told = json.loads(result.stdout.splitlines()[-1])
        assert told[0] == kind, told
        assert told[1] in ranks, told
        assert all(text in told[2] for text in texts), told


def test_errors_can_be_copied() -> None:
    """They go through queues of processes and keep what they know."""
    for kind in (RankLostError, CollectiveTimeoutError, MismatchError, LinkError):
        again = pickle.loads(pickle.dumps(kind("told", [2, 1])))
        assert (type(again), str(again), again.ranks) == (kind, "told", (1, 2))
