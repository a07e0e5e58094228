"""The thread that moves bytes: messages of all kinds, in all orders, and what is kept of them."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bagua_kernels.comm.backends.sockets import inbox as inbox_module
from bagua_kernels.comm.backends.sockets import loop as loop_module
from bagua_kernels.comm.backends.sockets.channel import Channel
from bagua_kernels.comm.backends.sockets.schedules import Ranks, all_to_all, messages
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfers, signature
from tests import limits
from tests.comm.backends.sockets.common import (
    array,
    by_hand,
    data,
    leaving_nothing,
    operation,
    over_tcp,
    part,
    receiving,
    sending,
    two,
    until,
    wait,
)
from tests.grids import grid


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


def test_messages_that_come_before_they_are_asked_for() -> None:
    """They wait, in whatever order they are asked for."""
    with by_hand() as (loop, (peer,)):
        for number in (2, 0, 1):
            peer.sendall(part(number, bytes([number]) * 100))
        until(lambda: len(loop._inbox._arrivals) == 3)
        for number in (1, 2, 0):
            got = torch.zeros(100, dtype=torch.uint8)
            work = receiving(number, got)
            loop.submit(work)
            wait(work)
            assert got.tolist() == [number] * 100
        assert loop._inbox._ahead == {1: 0}
        assert not loop._inbox._arrivals


@grid(cover=1, asked=["before", "between", "after"])
def test_what_may_be_received_anywhere_is_not_moved(asked: str) -> None:
    """It is in the memory that it arrived in, whether it was asked for before or not, and that memory is used again."""
    message = bytes(data(1000).numpy())
    used = []

    def steps(lane: Lane) -> Transfers:
        transfer = lane.receive_anywhere(1, torch.empty(250))
        yield [transfer]
        assert transfer.own is not None
        got.append(transfer.own.view(torch.float32).clone())
        used.append(transfer.own.data_ptr())
        lane.free(transfer)
        assert transfer.own is None

    with by_hand() as (loop, (peer,)):
        for number in range(3):
            got: list[torch.Tensor] = []
            work = operation(number, [steps])
            whole = part(number, message)
            cut = {"before": 0, "between": 500, "after": len(whole)}[asked]
            peer.sendall(whole[:cut])
            if cut:
                until(lambda: bool(loop._inbox._arrivals))
            loop.submit(work)
            peer.sendall(whole[cut:])
            wait(work)
            assert bytes(got[0].view(torch.uint8).numpy()) == message
            assert loop._inbox._ahead == {1: 0}
            assert not loop._inbox._arrivals
        assert len(set(used)) == 1
        # One of another size is told of, not taken.
        work = operation(3, [steps])
        peer.sendall(part(3, message[:-4]))
        loop.submit(work)
        with pytest.raises(RuntimeError, match="rank 1 sent 996 bytes where this rank expected 1000"):
            wait(work)


def test_peer_that_writes_byte_by_byte() -> None:
    """Headers come in pieces, and an empty message is one."""
    with by_hand() as (loop, (peer,)):
        got, empty = torch.zeros(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
        works = [receiving(0, got), receiving(1, empty), receiving(2, got)]
        loop.submit(works[0])
        loop.submit(works[1])
        for byte in part(0, b"hello") + part(1, b"") + part(2, b"WORLD"):
            peer.sendall(bytes([byte]))
            time.sleep(0)
        wait(works[0])
        wait(works[1])
        assert bytes(got.tolist()) == b"hello"
        loop.submit(works[2])
        wait(works[2])
        assert bytes(got.tolist()) == b"WORLD"


@grid(cover=1, asked=["before", "between", "after"], seed=range(3))
def test_parts_through_several_sockets(asked: str, seed: int) -> None:
    """Parts of two messages interleave, each in a socket of its own, in any order."""
    chance = random.Random(seed)
    sent, got = [data(10_000, 1), data(10_000, 2)], [torch.zeros(10_000, dtype=torch.uint8) for _ in range(2)]
    works = [receiving(number, tensor) for number, tensor in enumerate(got)]
    streams = [
        b"".join(
            part(number, bytes(sent[number][offset : offset + 4096].numpy()), offset, 10_000)
            for number in chance.sample(range(2), 2)
        )
        for offset in (0, 4096, 8192)
    ]
    with by_hand(3) as (loop, peers):
        at = chance.randrange(1, 12) if asked == "between" else (0 if asked == "before" else -1)
        step = 0
        while any(streams):
            if step == at:
                for work in works:
                    loop.submit(work)
            which = chance.choice([i for i in range(3) if streams[i]])
            n = chance.randrange(1, 3000)
            peers[which].sendall(streams[which][:n])
            streams[which] = streams[which][n:]
            step += 1
        if asked == "after":
            until(lambda: len(loop._inbox._arrivals) == 2 and not any(a.left for a in loop._inbox._arrivals.values()))
        for work in works:
            loop.submit(work) if asked == "after" or step <= at else None
            wait(work)
    assert all(torch.equal(*pair) for pair in zip(sent, got, strict=True))


def test_what_is_kept_ahead_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit messages stay in the network, and come when they are asked for."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 5000)
    most = 0
    with two() as (a, b):
        tensors = [data(1000, i) for i in range(40)]
        works = [sending(i, tensor) for i, tensor in enumerate(tensors)]
        for work in works:
            a.submit(work)
        until(lambda: b._links[0][0].parked is not None)
        for i, tensor in enumerate(tensors):
            most = max(most, b._inbox._ahead[0])
            got = torch.zeros(1000, dtype=torch.uint8)
            work = receiving(i, got, peer=0)
            b.submit(work)
            wait(work)
            assert torch.equal(got, tensor)
        for work in works:
            wait(work)
        assert b._inbox._ahead == {0: 0}
    assert 0 < most <= 5000


def test_limit_does_not_keep_back_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is asked for gets past those that nobody wants yet."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 5000)
    with two() as (a, b):
        tensors = [data(4000, i) for i in range(6)]
        for i, tensor in enumerate(tensors):
            a.submit(sending(i, tensor))
        until(lambda: b._inbox._ahead[0] > 0)
        for i in reversed(range(6)):
            got = torch.zeros(4000, dtype=torch.uint8)
            work = receiving(i, got, peer=0)
            b.submit(work)
            wait(work, 3.0)
            assert torch.equal(got, tensors[i])


def test_limit_reached_between_two_parts_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that had to wait is taken although another part of its message was let in meanwhile."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 9000)
    message = bytes(data(8192).numpy())
    with by_hand(2) as (loop, peers):
        peers[0].sendall(part(0, b"x" * 5000))
        until(lambda: loop._inbox._ahead[1] == 5000)
        peers[0].sendall(part(1, message[:4096], 0, 8192))
        until(lambda: loop._links[1][0].parked is not None)
        first, second = torch.zeros(5000, dtype=torch.uint8), torch.zeros(8192, dtype=torch.uint8)
        work = receiving(0, first)
        loop.submit(work)
        wait(work)
        peers[1].sendall(part(1, message[4096:], 4096, 8192))
        until(lambda: bool(loop._inbox._arrivals))
        work = receiving(1, second)
        loop.submit(work)
        wait(work, 3.0)
        assert bytes(second.numpy()) == message


@pytest.mark.parametrize("window", [1, 3])
def test_many_operations_under_way(window: int) -> None:
    """Two hundred of them, of several lanes and all sizes, waited for in reverse."""
    with two(2) as (a, b):
        a.use(2, 100)
        b.use(2, 100)
        sent = [[data(size, i) for size in (i % 7, i * 97, 5)] for i in range(200)]
        got = [[torch.zeros_like(tensor) for tensor in row] for row in sent]
        works = []
        for number in range(200):
            how = {"window": window, "brief": number % 3 == 0}
            out = operation(number, [partial(messages, [(1, tensor)], []) for tensor in sent[number]], **how)
            into = operation(number, [partial(messages, [], [(0, t)]) for t in got[number]], **how)
            a.submit(out)
            b.submit(into)
            works += [out, into]
        for work in reversed(works):
            wait(work)
    assert all(torch.equal(*pair) for rows in zip(sent, got, strict=True) for pair in zip(*rows, strict=True))


@pytest.mark.parametrize("brief", [False, True])
def test_two_threads_submit_at_once(brief: bool) -> None:
    """Each waits for its own."""
    wrong: list[int] = []
    with two() as (a, b):

        def talk(base: int) -> None:
            for number in range(base, base + 150):
                got = torch.zeros(300, dtype=torch.uint8)
                works = [sending(number, data(300, number), brief=brief), receiving(number, got, peer=0, brief=brief)]
                a.submit(works[0])
                b.submit(works[1])
                for work in works:
                    wait(work)
                if not torch.equal(got, data(300, number)):
                    wrong.append(number)

        threads = [threading.Thread(target=talk, args=(1000 * i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limits.seconds(30))
            assert not thread.is_alive()
    assert not wrong


def test_large_messages_both_ways_at_once() -> None:
    """More than any buffer holds, while neither side has read anything."""
    n = 8 << 20
    with two(3) as (a, b):
        a.use(3, 1 << 16)
        b.use(3, 1 << 16)
        outputs = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
        inputs = [data(n, i) for i in range(2)]
        works = []
        for rank, loop in enumerate((a, b)):
            peer = 1 - rank
            lane = partial(messages, [(peer, inputs[rank])], [(peer, outputs[rank])])
            works.append(operation(0, [lane]))
            loop.submit(works[-1])
        for work in works:
            wait(work)
    assert all(torch.equal(outputs[rank], inputs[1 - rank]) for rank in range(2))


@pytest.mark.usefixtures("small_heap")
@grid(cover=1, first=["asked", "sent"], n=[10, 3_000_000])
def test_nothing_refers_to_tensors_afterwards(n: int, first: str) -> None:
    """Neither what was sent nor what was received is kept once its operation is done, though the loops go on."""
    with two(2) as (a, b):
        b.use(2, 1 << 16)
        a.use(2, 1 << 16)
        arrays, seen = map(list, zip(*(array(n) for _ in range(2)), strict=True))
        works = [sending(0, torch.from_numpy(arrays[0])), receiving(0, torch.from_numpy(arrays[1]), peer=0)]
        if first == "asked":
            b.submit(works[1])
            until(lambda: bool(b._inbox._posted))
        a.submit(works[0])
        if first == "sent":
            until(lambda: bool(b._inbox._arrivals))
            b.submit(works[1])
        for work in works:
            wait(work)
        del arrays
        gc.collect()
        until(lambda: all(ref() is None for ref in seen))


def test_empty_messages_and_barriers() -> None:
    """Messages without bytes are messages."""
    token = torch.empty(0, dtype=torch.uint8)
    with two() as (a, b):
        for number in range(50):
            works = [
                operation(
                    number, [partial(all_to_all, Ranks(rank, 2), [token] * 2, [token] * 2)], code=signature("barrier")
                )
                for rank in range(2)
            ]
            a.submit(works[0])
            assert not works[0].is_completed()
            b.submit(works[1])
            for work in works:
                wait(work)


def test_brief_operation_starts_on_the_thread_that_submits_it() -> None:
    """If the loop has nothing else in hand, and on the loop's own thread otherwise."""
    threads = []

    def steps(lane: Lane) -> Transfers:
        threads.append(threading.current_thread())
        yield []

    with by_hand() as (loop, _):
        works = [operation(number, [steps], brief=number != 1) for number in range(3)]
        for work in works[:2]:
            loop.submit(work)
            wait(work)
        with loop._moving:
            loop.submit(works[2])
        wait(works[2])
        assert threads == [threading.current_thread(), loop._thread, loop._thread]


def test_bytes_are_gathered_before_the_thread_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that trickle in do not wake it one by one; the last ones, of which there are few, do."""
    reads: list[int] = []
    original = loop_module.Loop._read

    def counted(self: loop_module.Loop, channel: Channel) -> None:
        reads.append(len(channel.rest))
        original(self, channel)

    monkeypatch.setattr(loop_module.Loop, "_read", counted)
    total, step = (1 << 20) + 4321, 4096
    with over_tcp() as (loop, peer):
        for number in range(2):
            sent, got = data(total, number), torch.zeros(total, dtype=torch.uint8)
            work = receiving(number, got)
            loop.submit(work)
            message = part(number, sent.numpy().tobytes())
            for begin in range(0, len(message), step):
                peer.sendall(message[begin : begin + step])
                time.sleep(0.0005)
            wait(work)
            assert torch.equal(got, sent)
        # A message of a few bytes arrives after a large one as it would without.
        got = torch.zeros(3, dtype=torch.uint8)
        work = receiving(2, got)
        loop.submit(work)
        peer.sendall(part(2, b"abc"))
        wait(work)
        assert got.tolist() == list(b"abc")
    assert len(reads) < 2 * total / step / 4


def test_connection_that_ends_in_a_large_message() -> None:
    """Though fewer bytes are there than the thread waits for."""
    with over_tcp() as (loop, peer):
        work = receiving(0, torch.zeros(1 << 20, dtype=torch.uint8))
        loop.submit(work)
        peer.sendall(part(0, bytes(1 << 20))[:300_000])
        time.sleep(0.05)
        peer.close()
        with pytest.raises(RuntimeError, match="the connection to rank 1 broke"):
            wait(work)
