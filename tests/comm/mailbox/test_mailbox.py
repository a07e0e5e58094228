"""One contract for all mailboxes: ranks as threads in memory and over sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from bagua_kernels.comm import Communicator, Mailbox, open_mailbox, run_ranks
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.errors import RankLostError
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


@contextlib.contextmanager
def busy(box: SocketMailbox) -> Iterator[None]:
    """The thread of a mailbox has something else to do until the end of the block."""
    entered, over = threading.Event(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box._loop, "_do_here", lambda function, name: False)
        box._loop.call(lambda: (entered.set(), over.wait(limits.seconds(10)), None)[-1], "something else")
        assert entered.wait(limits.seconds(10))
        yield
        assert not over.is_set()
        over.set()


def test_dropped_ranks_are_lost_at_once() -> None:
    """Also while the loop has something else to do, so that it comes to them later; nothing of theirs is taken any more."""

    def run(communicator: Communicator) -> None:
        with SocketMailbox(communicator, host="127.0.0.1") as box:
            if communicator.rank == 1:
                for number in range(6):
                    box.exchange({}, {0: torch.ones(5)}, number).wait()
                communicator.barrier().wait()
            else:
                communicator.barrier().wait()
                box.exchange({1: torch.empty(5)}, {}, 5).wait()
                with busy(box):
                    taken = box.exchange({1: torch.empty(5)}, {}, 3)
                    box.drop(below=2)
                    late = box.exchange({1: torch.empty(5)}, {}, 2)
                    box.drop([1])
                    assert box.lost() == {1: "it was dropped"}
                    refused = box.exchange({1: torch.empty(5)}, {}, 4)
                taken.wait()
                late.wait()
                with pytest.raises(RankLostError, match="it was dropped"):
                    refused.wait()
            communicator.barrier().wait()

    run_ranks(2, run)
