"""The thread that moves bytes where something goes wrong: the peer, the other operation, or a step."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bagua_kernels.comm.backends.sockets import inbox as inbox_module
from bagua_kernels.comm.backends.sockets.channel import Channel
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.schedules import messages
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfers, signature
from tests.comm.backends.sockets.common import (
    HEADER,
    SEND,
    array,
    by_hand,
    by_way,
    leaving_nothing,
    operation,
    part,
    receiving,
    sending,
    striped,
    until,
    wait,
)
from tests.grids import grid


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


class CountingEpoll:
    """Counts how often a loop looks for events."""

    def __init__(self, epoll: select.epoll) -> None:
        self.epoll = epoll
        self.polls = 0

    def poll(self) -> list[tuple[int, int]]:
        self.polls += 1
        return self.epoll.poll()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.epoll, name)


def test_peer_that_dies_while_nothing_more_is_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread does not spin, and what is asked for afterwards ends with an error or what was sent."""
    monkeypatch.setattr(inbox_module, "_AHEAD", 1000)
    with by_hand() as (loop, (peer,)):
        peer.sendall(part(0, b"x" * 900) + part(1, b"y" * 900))
        until(lambda: loop._inbox._ahead[1] == 900)
        epoll = CountingEpoll(loop._epoll)
        loop._epoll = epoll  # type: ignore[assignment]
        peer.close()
        time.sleep(0.3)
        assert epoll.polls < 100
        for number, byte in ((0, b"x"), (1, b"y")):
            got = torch.zeros(900, dtype=torch.uint8)
            work = receiving(number, got)
            loop.submit(work)
            with contextlib.suppress(RuntimeError):
                wait(work, 3.0)
            assert work.is_completed()
            assert "rank 1" in str(work.error) if work.error else bytes(got.numpy()) == byte * 900


@grid(cover=1, first=["asked", "sent"])
def test_call_of_another_operation(first: str) -> None:
    """The error says what both ranks called, and the next operation works."""
    with by_hand() as (loop, (peer,)):
        got = torch.zeros(4, dtype=torch.uint8)
        lane = partial(messages, [(1, torch.zeros(4))], [(1, got)])
        work = operation(5, [lane], name="all_reduce", code=signature("all_reduce", 4))
        theirs = part(5, b"1234", code=signature("broadcast", 4))
        if first == "asked":
            loop.submit(work)
            until(lambda: bool(loop._inbox._posted))
        peer.sendall(theirs)
        if first == "sent":
            until(lambda: bool(loop._inbox._arrivals))
            loop.submit(work)
        with pytest.raises(RuntimeError, match="rank 1 called broadcast where this rank called all_reduce"):
            wait(work)
        assert not got.any()
        other = operation(6, [lane], name="all_reduce", code=signature("all_reduce", nbytes=4))
        loop.submit(other)
        peer.sendall(part(6, b"1234", code=signature("all_reduce", nbytes=5)))
        with pytest.raises(
            RuntimeError, match="called all_reduce of 5 bytes where this rank called all_reduce of 4 bytes"
        ):
            wait(other)
        work = receiving(7, got)
        loop.submit(work)
        peer.sendall(part(7, b"5678"))
        wait(work)
        assert bytes(got.numpy()) == b"5678"


@grid(cover=1, first=["asked", "sent"])
def test_message_of_another_size(first: str) -> None:
    """The receiver hears both sizes, whether it asked before or after; its memory stays as it is."""
    with by_hand() as (loop, (peer,)):
        got = torch.zeros(8, dtype=torch.uint8)
        work = receiving(0, got)
        if first == "asked":
            loop.submit(work)
            until(lambda: bool(loop._inbox._posted))
        peer.sendall(part(0, b"x" * 9))
        if first == "sent":
            until(lambda: bool(loop._inbox._arrivals))
            loop.submit(work)
        with pytest.raises(RuntimeError, match="rank 1 sent 9 bytes where this rank expected 8 in its send"):
            wait(work)
        assert not got.any()
        peer.sendall(part(1, b"y" * 8))
        work = receiving(1, got)
        loop.submit(work)
        wait(work)
        assert bytes(got.numpy()) == b"y" * 8


@grid(cover=1, length=[0, 20, 40, 60], asked=["before", "after"])
def test_peer_closes_before_a_message_is_complete(length: int, asked: str) -> None:
    """Who waits for the rest hears that the connection broke, whenever it asked; so does who asks for anything else."""
    with by_hand(2) as (loop, peers):
        got = torch.zeros(100, dtype=torch.uint8)
        works = [receiving(0, got), receiving(1, got), sending(2, got)]
        if asked == "before":
            loop.submit(works[0])
        peers[1].sendall(part(0, b"x" * 100)[:length])
        if length > 40 and asked == "after":
            until(lambda: bool(loop._inbox._arrivals))
        peers[1].close()
        until(lambda: bool(loop._lost))
        for work in works[asked == "before" :]:
            loop.submit(work)
        for work in works:
            with pytest.raises(RuntimeError, match="the connection to rank 1 broke"):
                wait(work, 3.0)


def test_peer_closes_after_its_messages() -> None:
    """What it has sent is still there to be received."""
    with by_hand() as (loop, (peer,)):
        peer.sendall(part(0, b"x" * 100) + part(1, b"y" * 100))
        peer.close()
        until(lambda: bool(loop._lost))
        for number, byte in ((1, b"y"), (0, b"x")):
            got = torch.zeros(100, dtype=torch.uint8)
            work = receiving(number, got)
            loop.submit(work)
            wait(work)
            assert bytes(got.numpy()) == byte * 100


def test_loss_of_one_rank_leaves_the_others() -> None:
    """Operations that need only other ranks go on."""
    pairs = {peer: socket.socketpair() for peer in (1, 2)}
    loop = Loop("three", {peer: [pair[0]] for peer, pair in pairs.items()}, lambda n: None)
    try:
        got = torch.zeros(100, dtype=torch.uint8)
        lost, kept = receiving(0, got, 1), receiving(0, got, 2)
        loop.submit(lost)
        loop.submit(kept)
        pairs[1][1].close()
        with pytest.raises(RuntimeError, match="rank 1 broke"):
            wait(lost)
        assert not kept.is_completed()
        pairs[2][1].sendall(part(0, b"z" * 100))
        wait(kept)
        assert bytes(got.numpy()) == b"z" * 100
    finally:
        loop.stop("over")
        pairs[2][1].close()


def test_step_that_raises() -> None:
    """The waiting thread gets the error, and other operations go on."""

    def broken(lane: Lane) -> Transfers:
        yield [lane.receive(1, torch.zeros(1, dtype=torch.uint8))]
        raise ZeroDivisionError("boom")

    with by_hand() as (loop, (peer,)):
        got = torch.zeros(1, dtype=torch.uint8)
        works = [operation(0, [broken]), receiving(1, got)]
        for work in works:
            loop.submit(work)
        peer.sendall(part(0, b"x") + part(1, b"y"))
        with pytest.raises(RuntimeError, match="boom"):
            wait(works[0])
        wait(works[1])
        assert bytes(got.numpy()) == b"y"


@pytest.mark.parametrize("who", ["another thread", "twice", "two threads", "its own thread"])
def test_stop_ends_what_is_under_way(who: str) -> None:
    """A transfer that is half done, one that has not begun, and what is submitted afterwards."""
    with by_hand() as (loop, (peer,)):
        got, sent = torch.zeros(100, dtype=torch.uint8), torch.zeros(16 << 20, dtype=torch.uint8)
        works = [receiving(0, got), receiving(1, got), sending(2, sent)]
        for work in works:
            loop.submit(work)
        peer.sendall(part(0, b"x" * 100)[:90])
        until(lambda: loop._links[1][0].writing and bool(loop._inbox._arrivals))
        if who == "its own thread":

            def steps(lane: Lane) -> Transfers:
                loop.stop("enough of it")
                yield []

            loop.submit(operation(3, [steps]))
        elif who == "two threads":
            threads = [threading.Thread(target=loop.stop, args=("enough of it",)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            loop.stop("enough of it")
            if who == "twice":
                loop.stop("something else")
        for work in works:
            with pytest.raises(RuntimeError, match="enough of it"):
                wait(work, 5.0)
        until(lambda: not loop._thread.is_alive())
        late = receiving(9, got)
        loop.submit(late)
        with pytest.raises(RuntimeError, match="enough of it"):
            wait(late, 0.0)
        loop.stop("again")
        assert loop._woken == -1


@pytest.mark.parametrize("how", ["interrupted", "stopped"])
def test_brief_operation_that_does_not_get_through_its_first_steps(how: str) -> None:
    """What it has sent is not known after an interruption, so that the loop ends; stopping it there waits for nobody."""
    with by_hand() as (loop, _):

        def steps(lane: Lane) -> Transfers:
            if how == "interrupted":
                raise KeyboardInterrupt
            loop.stop("enough of it")
            yield [lane.receive(1, torch.zeros(1, dtype=torch.uint8))]

        waiting, work = receiving(0, torch.zeros(1, dtype=torch.uint8)), operation(1, [steps], brief=True)
        loop.submit(waiting)
        until(lambda: waiting in loop._running)
        with loop._moving:  # until its thread has nothing in hand: it would else take the first steps itself
            pass
        with pytest.MonkeyPatch.context() as patch:
            joined: list[float] = []
            patch.setattr(loop._thread, "join", joined.append)
            with pytest.raises(KeyboardInterrupt) if how == "interrupted" else contextlib.nullcontext():
                loop.submit(work)
            assert joined == []
        for each in (waiting, work):
            with pytest.raises(RuntimeError, match="send was interrupted" if how == "interrupted" else "enough of it"):
                wait(each, 5.0)


def test_handler_that_raises_while_bytes_are_counted_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gone to the kernel without a note would be sent twice."""
    with by_hand() as (loop, _):
        work = sending(0, torch.zeros(10, dtype=torch.uint8), brief=True)

        def broken(self: Channel, done: object) -> bool:
            self.torn = True
            raise ArithmeticError("from a signal's handler")

        monkeypatch.setattr(Channel, "flush", broken)
        with pytest.raises(ArithmeticError, match="handler"):
            loop.submit(work)
        with pytest.raises(RuntimeError, match="send was interrupted"):
            wait(work, 5.0)
        until(lambda: not loop._thread.is_alive())


def test_default_device_of_the_caller_does_not_matter() -> None:
    def fn(c: StripedCommunicator) -> None:
        x = torch.ones(100)
        with torch.device("meta"):
            c.all_reduce(x).wait()
            c.barrier().wait()
        assert x.tolist() == [2.0] * 100

    striped(2, fn, by_way("exchange"))


@pytest.mark.usefixtures("small_heap")
def test_nothing_refers_to_tensors_of_a_stopped_loop() -> None:
    """What was under way is let go, though somebody still holds the loop."""
    with by_hand() as (loop, (peer,)):
        arrays, seen = map(list, zip(*(array(16 << 20) for _ in range(2)), strict=True))
        works = [sending(0, torch.from_numpy(arrays[0])), receiving(1, torch.from_numpy(arrays[1]))]
        for work in works:
            loop.submit(work)
        peer.sendall(part(1, b"x" * 100, total=16 << 20))
        until(lambda: loop._links[1][0].writing and bool(loop._inbox._arrivals))
        loop.stop("over")
        del arrays, works, work
        gc.collect()
        assert all(ref() is None for ref in seen)


def test_garbage_ends_the_loop_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the thread ends what is under way with its reason."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with by_hand() as (loop, (peer,)):
        work = receiving(0, torch.zeros(1, dtype=torch.uint8))
        loop.submit(work)
        peer.sendall(HEADER.pack(0, 77, SEND, 0, 5, 10, 3) + b"0123456789")
        with pytest.raises(RuntimeError, match=r"ended: .+"):
            wait(work)
