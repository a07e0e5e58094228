"""A rank leaves a mailbox over sockets: what it had sent arrives, then the reason, and nobody is held up."""

from __future__ import annotations

import fcntl
import gc
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.sockets import farewell, inbox
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.errors import CommunicationError, RankLostError
from tests import limits
from tests.comm.backends.sockets.common import data, leaving_nothing, until
from tests.comm.mailbox.cases import meet
from tests.comm.mailbox.common import (
    LEAVE,
    LETTER,
    among_threads,
    by_hand,
    frame,
    message,
    over_sockets,
    raises,
    zeros,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


@pytest.mark.parametrize("first", ["letters", "tensors"])
def test_reason_comes_after_everything_else(first: str) -> None:
    """A rank that has said that it leaves is lost once its tensors have ended, too; nothing is sent to it meanwhile."""
    with by_hand() as box:
        work = box.exchange({1: zeros()}, {}, 0)
        box.letters[1].sendall(frame(LETTER, b"one") + frame(LEAVE, b"it left: enough"))
        if first == "letters":
            box.letters[1].close()
            until(lambda: bool(box._loop._leaving))
            assert box.lost() == {}
            raises(box.exchange({}, {1: zeros()}, 1), 1, r"\(it left: enough\)")
        box.tensors[1].sendall(message(0, b"x" * 100) + message(7, b"y" * 100))
        box.tensors[1].close()
        work.wait()
        until(lambda: bool(box.lost()))
        assert box.lost() == {1: "it left: enough"}
        got = zeros()
        box.exchange({1: got}, {}, 7).wait()
        assert bytes(got.numpy()) == b"y" * 100
        assert box.take(0.0) == (1, b"one")


def test_what_was_sent_before_leaving_arrives_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even what the receiver has no room for, while the receiver sends to the rank that has gone."""
    monkeypatch.setattr(inbox, "_AHEAD", 1000)

    def run(box: SocketMailbox) -> None:
        if box.rank == 0:
            for number in range(10):
                box.exchange({}, {1: data(50_000, number)}, number).wait()
                box.post(1, bytes([number]))
            box.leave("it is done")
            return
        until(lambda: 0 in box._loop._leaving)
        while not box.lost():
            work = box.exchange({}, {0: data(100)}, int(time.monotonic() * 1e9))
            try:
                work.wait()
            except RankLostError:
                break
        for number in range(10):
            got = zeros(50_000)
            box.exchange({0: got}, {}, number).wait()
            assert got.equal(data(50_000, number))
            assert box.take(1.0) == (0, bytes([number]))
        until(lambda: box.lost() == {0: "it left: it is done"})

    among_threads(2, run)


def test_leaving_loses_nothing_of_what_the_network_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is closed with unread bytes would lose what it has still to send."""
    monkeypatch.setattr(inbox, "_AHEAD", 1000)
    monkeypatch.setattr(farewell, "_LONGEST", 0.3)
    unread = threading.Event()
    numbers, n = range(9), 256 << 10

    def run(box: SocketMailbox) -> None:
        if box.rank == 0:
            for number in numbers:
                box.exchange({}, {1: data(n, number)}, number).wait()
            box.post(1, b"now")
            assert unread.wait(limits.seconds(10))
            until(lambda: box._loop._links[1][0].parked is not None)
            box.leave("it is done")
            return
        assert box.take(10.0) == (0, b"now")
        box.exchange({}, {0: data(n)}, 0)
        unread.set()
        until(lambda: 0 in box._loop._leaving)
        time.sleep(0.5)  # longer than a rank that leaves waits
        for number in numbers:
            got = zeros(n)
            box.exchange({0: got}, {}, number).wait()
            assert got.equal(data(n, number))
        until(lambda: box.lost() == {0: "it left: it is done"})

    among_threads(2, run)


def test_host_that_does_not_answer_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank leaves, though another one reads nothing of it."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(farewell, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with by_hand() as box:
        box.post(1, b"unread")
        box.leave()
        assert farewell._LONGEST < now < 2 * farewell._LONGEST


def test_leaving_wakes_those_that_wait() -> None:
    with by_hand() as box:
        work, errors = box.exchange({1: zeros()}, {}, 0), []

        def catch(call: Callable[[], object]) -> None:
            try:
                call()
            except CommunicationError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=catch, args=(call,)) for call in (work.wait, box.take, box.take)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        box.letters[1].close()
        box.tensors[1].close()
        box.leave("enough")
        for thread in threads:
            thread.join(limits.seconds(5))
        assert len(errors) == 3


@pytest.mark.usefixtures("small_heap")
def test_forgotten_mailbox_is_gone() -> None:
    """So are its memory and its sockets; the other rank hears of it."""

    def run(communicator: Communicator) -> None:
        box = over_sockets(communicator)
        meet(box)
        if communicator.rank == 0:
            thread, inbox = box._loop._thread, box._loop._inbox
            box.exchange({}, {1: data(100)}, 0).wait()
            box.exchange({1: zeros()}, {}, 1)
            del box
            gc.collect()
            thread.join(limits.seconds(10))
            assert not thread.is_alive()
            assert not inbox._arrivals
        else:
            until(lambda: 0 in box.lost())
            assert "forgotten" in box.lost()[0]
            box.leave()

    run_ranks(2, run)


def test_nobody_waits_for_a_connection_that_was_reset() -> None:
    """The other end has closed, and answers what comes afterwards by a reset: Linux keeps the count of what that has left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        other.close()
        with own:
            own.sendall(b"too late")
            limits.until(
                lambda: own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == farewell._CLOSED,
                "the reset has come",
            )
            (count,) = struct.unpack("i", fcntl.ioctl(own, termios.TIOCOUTQ, b"\0" * 4))
            assert count > 0
            assert farewell._on_the_way(own) == 0
