"""Communicators that share sockets: what one of them may do to another one, which is next to nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.sockets import channel as channel_module
from bagua_kernels.comm.backends.sockets import inbox as inbox_module
from bagua_kernels.comm.backends.sockets.channel import FAREWELL, FRAME
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.context import Context
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.comm.backends.sockets.schedules import messages
from bagua_kernels.comm.backends.sockets.transfer import Operation
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.errors import CommunicationError
from tests.comm.backends.sockets.common import (
    HEADER,
    SEND,
    by_hand,
    data,
    descriptors,
    leaving_nothing,
    striped,
    two,
    until,
    wait,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


def within(context: Context, number: int, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> Operation:
    """Messages of one operation of a context, by the ranks of its communicator."""
    lane = partial(messages, list(out.items()), list(into.items()))
    return Operation("send", context.number_of(number), SEND, iter([lane]), 4, context=context)


def both(a: Loop, b: Loop, number: int) -> tuple[Context, Context]:
    return a.open(number, (0, 1), lambda n: None), b.open(number, (0, 1), lambda n: None)


def of(context: int, number: int, contents: bytes) -> bytes:
    """A message of a context as it is on the wire."""
    return HEADER.pack(context, number, SEND, 0, 0, len(contents), len(contents)) + contents


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def test_duplicates_and_splits_open_nothing() -> None:
    """No descriptor, no thread and no message; a mailbox has two sockets for each other rank, and a communicator one."""
    met = threading.Barrier(3)

    def sockets() -> int:
        return sum("socket" in what for _, what in descriptors())

    def fn(c: StripedCommunicator) -> None:
        met.wait()
        before, threads, sent = sockets(), threading.active_count(), c.bytes_sent
        met.wait()
        more = [c.duplicate() for _ in range(5)]
        part = c.split([0, 2])
        more += [one.duplicate() for one in [*more, part] if one is not None]
        met.wait()
        assert (sockets(), threading.active_count(), c.bytes_sent) == (before, threads, sent)
        met.wait()
        for number, one in enumerate(more):
            x = torch.full((7,), float(number + c.rank))
            one.all_reduce(x, ReduceOp.MAX).wait()
            assert x.tolist() == [number + 2.0] * 7
        assert sockets() == before
        met.wait()
        box = SocketMailbox(c, host="127.0.0.1")
        met.wait()
        # Each pair of ranks has both ends in this process.
        assert sockets() == before + 2 * 3 * 2
        met.wait()
        box.leave()
        for one in [*more, part]:
            if one is not None:
                one.close()

    striped(3, fn, stripes=1)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_the_end_of_one_is_not_the_end_of_others(how: str) -> None:
    """Neither that of a duplicate, nor that of the communicator whose sockets they share."""

    def fn(c: Communicator) -> None:
        first, second = c.duplicate(), c.duplicate()
        for ending, staying in ((first, (c, second)), (c, (second,))):
            getattr(ending, how)()
            for one in staying:
                x = torch.ones(1000)
                one.all_reduce(x).wait()
                assert x.tolist() == [3.0] * 1000
            with pytest.raises(CommunicationError):
                ending.all_reduce(torch.ones(1))
        second.close()

    striped(3, fn)


def test_an_abort_is_told_to_the_ranks_of_that_communicator() -> None:
    """Those that wait in it get the reason, and nobody else notices."""

    def fn(c: Communicator) -> None:
        # Of two ranks: a third one's error could come before that of the first.
        one, part = c.split([0, 1]), c.split([0, 2])
        if one is not None and c.rank == 0:
            one.abort("of a whim")
        elif one is not None:
            with pytest.raises(CommunicationError, match="of a whim"):
                one.all_reduce(torch.ones(10)).wait()
        for other in (c, part):
            if other is not None:
                x = torch.ones(3)
                other.all_reduce(x).wait()
                assert x.tolist() == [float(other.size)] * 3
        if part is not None:
            part.close()

    striped(3, fn)


def test_a_message_that_nobody_receives_keeps_no_other_communicator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is larger than what is kept of a rank of which nothing is awaited."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 100_000)
    n = 8 << 20

    def fn(c: Communicator) -> None:
        slow = c.duplicate()
        got, sent = zeros(n), data(n, 1)
        works = [slow.send(sent, 1)] if c.rank == 0 else []
        for i in range(30):
            x = torch.full((100,), float(i))
            c.all_reduce(x).wait()
            assert x.tolist() == [2.0 * i] * 100
        if c.rank == 1:
            works = [slow.recv(got, 0)]
        for work in works:
            work.wait()
        assert c.rank == 0 or torch.equal(got, sent)
        slow.close()

    striped(2, fn, stripes=1)


def test_contexts_take_turns() -> None:
    """A small message leaves after one frame of a large one that was submitted before it, not after all of it."""
    with by_hand() as (loop, (peer,)):
        peer.settimeout(10)
        large, small = (loop.open(number, (0, 1), lambda n: None) for number in (7, 8))
        whole = data(40 * FRAME)
        loop.submit(within(large, 0, {1: whole}, {}))
        loop.submit(within(small, 0, {1: data(10)}, {}))
        until(lambda: len(loop._links[1][0].out) == 2)
        order, got = [], b""
        while sum(order.count(number) for number in (7, 8)) < 41:
            header = receive(peer, HEADER.size)
            context, _, _, _, offset, length, total = HEADER.unpack(header)
            order.append(context)
            contents = receive(peer, length)
            if context == 7:
                assert (offset, total) == (len(got), len(whole))
                got += contents
        assert got == bytes(whole.numpy())
        # What the kernel had taken before the small one was there comes first.
        assert order.index(8) < 30


def receive(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += peer.recv(count - len(found))
    return found


def test_messages_of_one_number_in_several_contexts() -> None:
    """They are told apart, also those that come before this rank has made the communicator."""
    with two() as (a, b):
        contexts = [a.open(number, (0, 1), lambda n: None) for number in (3, 1 << 63)]
        sent = [data(1000, i) for i in range(2)]
        works = [within(context, 0, {1: x}, {}) for context, x in zip(contexts, sent, strict=True)]
        for work in works:
            a.submit(work)
            wait(work)
        until(lambda: len(b._inbox._arrivals) == 2)
        for number, x in zip((3, 1 << 63), sent, strict=True):
            got = zeros(1000)
            work = within(b.open(number, (0, 1), lambda n: None), 0, {}, {0: got})
            b.submit(work)
            wait(work)
            assert torch.equal(got, x)


def test_ranks_are_numbered_by_their_communicator() -> None:
    """In errors, too: rank 1 of the sockets is rank 0 of this one."""
    with by_hand() as (loop, (peer,)):
        context = loop.open(5, (1, 0), lambda n: None)
        work = within(context, 0, {}, {0: zeros(10)})
        loop.submit(work)
        until(lambda: work.missing() == [0])
        peer.close()
        with pytest.raises(RuntimeError, match="the connection to rank 0 broke") as caught:
            wait(work)
        assert caught.value.__cause__.peer == 0  # type: ignore[union-attr]


def test_a_broken_connection_ends_all_contexts() -> None:
    """Each operation with that rank, whatever its communicator."""
    with by_hand() as (loop, (peer,)):
        works = [within(loop.open(n, (0, 1), lambda n: None), 0, {}, {1: zeros(10)}) for n in (1, 2)]
        for work in works:
            loop.submit(work)
        peer.close()
        for work in works:
            with pytest.raises(RuntimeError, match="the connection to rank 1 broke"):
                wait(work)


def test_a_farewell_counts_when_all_sockets_have_brought_it() -> None:
    """What was sent before it may still be in another socket. Operations after it fail at once."""
    with by_hand(2) as (loop, peers):
        context = loop.open(9, (0, 1), lambda n: None)
        got, never = zeros(4), zeros(4)
        works = [within(context, 0, {}, {1: got}), within(context, 1, {}, {1: never})]
        for work in works:
            loop.submit(work)
        farewell = HEADER.pack(9, FAREWELL, 0, 0, 0, 3, 3) + b"why"
        peers[0].sendall(farewell)
        until(lambda: loop._farewells == {(9, 1): 1})
        peers[1].sendall(of(9, 0, b"last"))
        wait(works[0])
        peers[1].sendall(farewell)
        with pytest.raises(RuntimeError, match="rank 1 has left the communicator: why"):
            wait(works[1])
        assert bytes(got.tolist()) == b"last"
        after = within(context, 2, {1: zeros(4)}, {})
        loop.submit(after)
        with pytest.raises(RuntimeError, match="rank 1 has left the communicator: why"):
            wait(after)
        # A farewell may come before its communicator is made.
        for peer in peers:
            peer.sendall(HEADER.pack(10, FAREWELL, 0, 0, 0, 0, 0))
        until(lambda: (10, 1) in loop._departed)
        late = within(loop.open(10, (0, 1), lambda n: None), 0, {}, {1: zeros(1)})
        loop.submit(late)
        with pytest.raises(RuntimeError, match="has left the communicator"):
            wait(late)


def test_what_comes_of_a_context_that_was_left_is_thrown_away() -> None:
    """Whether it was early, half here, or is still to come; and its memory is free."""
    with by_hand() as (loop, (peer,)):
        left, stays = (loop.open(number, (0, 1), lambda n: None) for number in (1, 2))
        half = within(left, 1, {}, {1: zeros(1000)})
        loop.submit(half)
        peer.sendall(of(1, 0, b"early") + of(1, 1, bytes(1000))[:500])
        until(lambda: len(loop._inbox._arrivals) == 2)
        loop.leave(left, "enough")
        with pytest.raises(RuntimeError, match="enough"):
            wait(half)
        peer.sendall(of(1, 1, bytes(1000))[500:] + of(1, 2, b"late") + of(2, 0, b"good"))
        got = zeros(4)
        work = within(stays, 0, {}, {1: got})
        loop.submit(work)
        wait(work)
        assert bytes(got.tolist()) == b"good"
        assert (loop._inbox._arrivals, loop._inbox._ahead, loop._inbox._wanted) == ({}, {1: 0}, {1: 0})
        loop.leave(stays, "enough")
        assert not loop._thread.is_alive()


def test_leaving_while_bytes_leave() -> None:
    """The frame that has begun ends, out of memory that is no longer the caller's; the next context is understood."""
    with two() as (a, b):
        (first, _), (second, other) = both(a, b, 1), both(a, b, 2)
        large = data(64 * FRAME)
        work = within(first, 0, {1: large}, {})
        a.submit(work)
        until(lambda: a._links[1][0].moved > 0)
        a.leave(first, "enough")
        with pytest.raises(RuntimeError, match="enough"):
            wait(work)
        large.fill_(0)
        got, sent = zeros(3 * FRAME + 5), data(3 * FRAME + 5, 2)
        works = [within(second, 0, {1: sent}, {}), within(other, 0, {}, {0: got})]
        a.submit(works[0])
        b.submit(works[1])
        for one in works:
            wait(one)
        assert torch.equal(got, sent)


def test_a_farewell_of_impossible_length_ends_the_connection() -> None:
    """It is no farewell."""
    with by_hand() as (loop, (peer,)):
        work = within(loop.open(1, (0, 1), lambda n: None), 0, {}, {1: zeros(1)})
        loop.submit(work)
        peer.sendall(HEADER.pack(1, FAREWELL, 0, 0, 0, channel_module.LONGEST_REASON + 1, 0))
        with pytest.raises(RuntimeError, match="expected a reason of at most"):
            wait(work)


@pytest.mark.parametrize("ranks", [[2, 3], [0, 3], [1, 2, 3]], ids=str)
def test_collectives_of_some_ranks_number_them_anew(ranks: list[int]) -> None:
    """All ways, small and large: a part's ranks are others than those of the sockets."""

    def rank(base: Communicator) -> None:
        with StripedCommunicator(base.duplicate()) as whole:
            part = whole.split(ranks)
            if part is not None:
                for n in (8, 3000, 100_000):
                    x = torch.arange(n * part.size, dtype=torch.float32) + part.rank
                    total = sum(torch.arange(n * part.size, dtype=torch.float32) + each for each in range(part.size))
                    mine = torch.zeros(n)
                    part.reduce_scatter(mine, x.clone()).wait()
                    assert torch.equal(mine, total[part.rank * n : (part.rank + 1) * n])
                    summed = x.clone()
                    part.all_reduce(summed).wait()
                    assert torch.equal(summed, total)
                    rows = torch.zeros(part.size, n)
                    part.all_gather(rows, torch.full((n,), float(part.rank))).wait()
                    assert torch.equal(rows[:, 0], torch.arange(part.size, dtype=torch.float32))
                    sent = torch.full((n,), float(part.rank))
                    part.broadcast(sent, part.size - 1).wait()
                    assert bool((sent == part.size - 1).all())
                part.close()
            whole.barrier().wait()

    run_ranks(4, rank)
