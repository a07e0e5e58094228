"""What a broken connection means: the end of a process, or of a line between two that live."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership import membership
from bagua_kernels.comm.membership.pulse import Pulse, has_ended
from bagua_kernels.errors import CommunicationError, MembershipError
from tests import limits
from tests.comm.membership.over_sockets import listening

SECRET = Secret.from_text("known to the ranks of this test alone")
TIMEOUT = 8.0
ANSWERS = (False, "its process answers a new connection")


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse("127.0.0.1")
    yield made
    made.close()
    made.close()


def test_a_process_answers_until_it_ends(pulse: Pulse) -> None:
    for _ in range(3):
        assert has_ended(pulse.address, limits.seconds(1.0)) == ANSWERS
    pulse.close()
    gone, why = has_ended(pulse.address, limits.seconds(1.0))
    assert gone
    assert "refused" in why
    limits.until(lambda: all(each.name != "bagua_kernels pulse" for each in threading.enumerate()), "the thread ends")


def test_callers_that_take_nothing_keep_nobody_waiting(pulse: Pulse) -> None:
    host, port, _ = pulse.address
    with socket.create_connection((host, port)), socket.create_connection((host, port)):
        assert has_ended(pulse.address, limits.seconds(1.0)) == ANSWERS


def test_another_process_at_the_port_is_no_answer(pulse: Pulse) -> None:
    host, port, token = pulse.address
    other = "0" * len(token)
    assert has_ended((host, port, other), limits.seconds(1.0)) == (True, "another process listens at its port")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = ("127.0.0.1", silent.getsockname()[1], token)
        # As a process that is stopped, or one behind a firewall.
        gone, why = has_ended(place, 0.05)
        assert not gone
        assert "timed out" in why


def test_who_cannot_ask_is_not_certain(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "create_connection", full)
    assert not has_ended(pulse.address, 1.0)[0]


def test_a_forked_child_does_not_answer_for_its_parent() -> None:
    """It has a copy of the socket, which it closes."""
    made = Pulse("127.0.0.1")
    ready, go = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    made.close()
    gone, found = has_ended(made.address, limits.seconds(1.0))
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)
    assert gone
    assert "refused" in found


def cut(members: Membership, name: int) -> None:
    """Breaks the connections to a member, which knows nothing of it before."""
    line = members._line
    loops: list[Any] = [line.anchor._loop, line.mailbox._loop]  # type: ignore[attr-defined]
    for loop in loops:
        for channel in loop._links[line.rank_of(name)]:
            with contextlib.suppress(OSError):  # the first one that broke has ended others
                channel.sock.shutdown(socket.SHUT_RDWR)


def after_a_cut(ranks: int, pair: tuple[int, int]) -> list[Any]:
    """Returns of each rank the members that it goes on with, or the error with which it does not."""

    done = threading.Barrier(ranks)

    def program(communicator: LocalCommunicator) -> Any:
        with listening(communicator, SECRET, {}) as members:
            done.wait(limits.seconds(TIMEOUT))
            if members.name == pair[0]:
                cut(members, pair[1])
            try:
                while True:
                    try:
                        members.communicator.barrier().wait()
                    except CommunicationError as error:
                        members.change(error)
                        return members.ranks
            except MembershipError as error:
                return str(error)
            finally:
                # One that has given up is not gone yet.
                done.wait(limits.seconds(2 * TIMEOUT))
                members.close()

    return run_ranks(ranks, program, timeout=limits.seconds(TIMEOUT))


def test_two_that_live_do_not_both_go_on_alone() -> None:
    for found in after_a_cut(2, (0, 1)):
        assert "answers a new connection" in found or "not more than half" in found, found


def test_of_two_that_live_one_is_left_out_by_a_majority() -> None:
    found = after_a_cut(3, (0, 2))
    assert found[0] == found[1] == (0, 1)
    assert isinstance(found[2], str)


def test_a_broken_connection_alone_is_evidence_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "has_ended", lambda address, seconds: (True, "refused"))
    found = after_a_cut(2, (0, 1))
    assert (0,) in found or (1,) in found
