"""One contract for all mailboxes: ranks as threads in memory and over sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bagua_kernels.comm import Communicator, Mailbox, open_mailbox, run_ranks
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from tests import limits
from tests.comm.backends.sockets.common import leaving_nothing
from tests.comm.mailbox.cases import CASES
from tests.grids import grid


def over_sockets(communicator: Communicator) -> Mailbox:
    return SocketMailbox(communicator, host="127.0.0.1")


@grid(case=CASES, size=[2, 3, 4], make=[open_mailbox, over_sockets], cover=1)
def test_contract(case: Callable[[Mailbox], None], size: int, make: Callable[[Communicator], Mailbox]) -> None:
    def run(communicator: Communicator) -> None:
        with make(communicator) as box:
            assert (box.rank, box.size, box.timeout) == (communicator.rank, size, communicator.timeout)
            case(box)
            # A rank that has returned is lost to the others.
            communicator.barrier().wait()

    with leaving_nothing():
        run_ranks(size, run)


def test_dropped_ranks_are_lost_at_once() -> None:
    """Also while the loop has something else to do, so that it comes to them later."""

    def run(communicator: Communicator) -> None:
        with SocketMailbox(communicator, host="127.0.0.1") as box:
            communicator.barrier().wait()
            if communicator.rank == 0:
                entered, over = threading.Event(), threading.Event()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(box._loop, "_do_here", lambda function, name: False)
                    box._loop.call(lambda: (entered.set(), over.wait(limits.seconds(10)), None)[-1], "something else")
                    assert entered.wait(limits.seconds(10))
                    box.drop([1])
                    assert box.lost() == {1: "it was dropped"}
                    assert not over.is_set()
                    over.set()
            communicator.barrier().wait()

    run_ranks(2, run)
