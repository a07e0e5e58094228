"""What a mailbox over sockets keeps: a bounded part of what nobody has asked for, and nothing of what is over."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from bagua_kernels.comm.backends.sockets import inbox
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from tests import limits
from tests.comm.backends.sockets.common import data, leaving_nothing, until
from tests.comm.mailbox.cases import meet
from tests.comm.mailbox.common import LETTER, among_threads, by_hand, frame, message

LARGE = 24 << 20  # bytes: more than two kernels hold of one connection


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


def test_letters_overtake_tensors_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor above the limit stays in the network, and its sender waits; letters go on, both ways."""
    monkeypatch.setattr(inbox, "_AHEAD", 1 << 20)
    there = threading.Event()

    def run(box: SocketMailbox) -> None:
        peer = 1 - box.rank
        if box.rank == 0:
            tensors = [data(1 << 20), data(LARGE, 1)]
            works = [box.exchange({}, {1: tensor}, number) for number, tensor in enumerate(tensors)]
            works[0].wait()
            box.post(1, b"behind the tensor")
            assert box.take(10.0) == (1, b"an answer")
            assert not works[1].is_completed()
            there.set()
            works[1].wait()
            return
        assert box.take(10.0) == (0, b"behind the tensor")
        until(lambda: box._loop._links[0][0].parked is not None)
        box.post(0, b"an answer")
        assert there.wait(limits.seconds(10))
        assert box._loop._inbox._ahead[0] == 1 << 20
        # It lies behind the other one.
        for number, nbytes in ((1, LARGE), (0, 1 << 20)):
            got = torch.zeros(nbytes, dtype=torch.uint8)
            box.exchange({peer: got}, {}, number).wait()
            assert got.equal(data(nbytes, number))
        assert box._loop._inbox._ahead[0] == 0

    among_threads(2, run)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("arrived", [100, 60, 0])
def test_dropped_memory_is_freed(arrived: int) -> None:
    """So is that of a message of which only a part has come; what comes behind it is received."""
    with by_hand() as box:
        loop = box._loop
        whole = message(3, bytes(100))
        box.tensors[1].sendall(message(2, bytes(1000)) + whole[: len(whole) - 100 + arrived] * bool(arrived))
        until(lambda: len(loop._inbox._arrivals) == 1 + bool(arrived))
        memory = [weakref.ref(each.own) for each in loop._inbox.unasked()]
        box.drop(below=4)
        until(lambda: loop.below == 4)
        assert (loop._inbox._arrivals, loop._inbox._ahead) == ({}, {1: 0})
        gc.collect()
        assert [ref() for ref in memory] == [None] * len(memory)
        box.tensors[1].sendall(whole[-(100 - arrived) :] * (0 < arrived < 100))
        # Late ones, too, also if they are longer than what is read at once.
        box.tensors[1].sendall(message(1, bytes(200_000)) + message(0, b"") + message(4, b"y" * 100))
        got = torch.zeros(100, dtype=torch.uint8)
        box.exchange({1: got}, {}, 4).wait()
        assert bytes(got.numpy()) == b"y" * 100
        assert (loop._inbox._arrivals, loop._inbox._ahead) == ({}, {1: 0})


def test_drop_lets_go_on_what_lies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that was not read any more is read again."""
    monkeypatch.setattr(inbox, "_AHEAD", 1000)
    with by_hand() as box:
        box.tensors[1].sendall(message(0, bytes(900)) + message(1, bytes(900)) + message(2, b"z" * 900))
        until(lambda: box._loop._links[1][0].parked is not None)
        box.drop(below=2)
        until(lambda: box._loop._inbox._ahead[1] == 900)
        got = torch.zeros(900, dtype=torch.uint8)
        box.exchange({1: got}, {}, 2).wait()
        assert bytes(got.numpy()) == b"z" * 900


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_many_exchanges_leave_nothing(count: int) -> None:
    """Thousands of them, in bunches that match in any order: no entry stays behind."""
    bunch = 500
    kept: dict[int, int] = {}

    def run(box: SocketMailbox) -> None:
        peer = 1 - box.rank
        got, mine = torch.zeros(bunch, 4), torch.zeros(bunch, 4)

        def exchange(first: int) -> None:
            order = range(bunch) if box.rank else reversed(range(bunch))
            for work in [box.exchange({peer: got[i]}, {peer: mine[i]}, (1 << 40) + first + i) for i in order]:
                work.wait()

        exchange(0)
        meet(box, 0)
        if box.rank == 0:
            gc.collect()
            kept[0] = len(gc.get_objects())
        for number, first in enumerate(range(bunch, count, bunch), 1):
            exchange(first)
            box.post(peer, b"x")
            assert box.take(10.0) == (peer, b"x")
            meet(box, number)
        if box.rank == 0:
            gc.collect()
            kept[1] = len(gc.get_objects())
        meet(box, count)
        loop = box._loop
        held = (loop._running, loop.waiting, loop._inbox._posted, loop._inbox._arrivals, loop._ready, loop._called)
        until(lambda: not any(held))

    among_threads(2, run)
    assert kept[1] - kept[0] < 500


def test_letters_in_pieces() -> None:
    """However the bytes of a letter come."""
    with by_hand() as box:
        text = frame(LETTER, b"first") + frame(LETTER) + frame(LETTER, bytes(range(256)) * 256)
        for begin in range(0, len(text), 7001):
            box.letters[1].sendall(text[begin : begin + 7001])
        taken = [box.take(5.0) for _ in range(3)]
        assert taken == [(1, b"first"), (1, b""), (1, bytes(range(256)) * 256)]
