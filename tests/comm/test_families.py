"""What is made of a communicator ends with it where that is asked for, and nowhere else."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from bagua_kernels.comm import Communicator, LocalCommunicator, StripedCommunicator, run_ranks
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.grids import grid


def made_of(communicator: LocalCommunicator, sockets: bool) -> Communicator:
    return StripedCommunicator(communicator, host="127.0.0.1") if sockets else communicator


@grid(sockets=[False, True])
def test_a_family_is_aborted(sockets: bool) -> None:
    """Copies of copies, and splits; on another rank they go on until they need this one."""
    over = threading.Barrier(2, timeout=limits.seconds(20))

    def fn(base: LocalCommunicator) -> None:
        parent = made_of(base, sockets)
        copy, sibling = parent.duplicate(), parent.duplicate()
        family = [parent, copy, copy.duplicate(), copy.split([0, 1]), parent.split([base.rank])]
        if base.rank == 0:
            copy.abort_family("it had enough")
            assert [each is not None and each.is_ended() for each in family] == [False, True, True, True, False]
            parent.abort_family("it had more than enough")
            for each in (*family, sibling):
                assert each is not None
                with pytest.raises(CommunicationError, match=r"it had (more than )?enough"):
                    each.barrier()
        over.wait()
        parent.abort_family("the test ends")

    run_ranks(2, fn, timeout=limits.seconds(20))


def test_what_is_made_while_its_parent_is_aborted_ends_too() -> None:
    def fn(parent: LocalCommunicator) -> None:
        split = parent._split

        def slow(ranks: tuple[int, ...]) -> LocalCommunicator:
            made = split(ranks)
            parent.abort_family("it was aborted by another thread")
            return made

        parent._split = slow  # type: ignore[method-assign]
        assert parent.duplicate().is_ended()

    run_ranks(2, fn)


def test_a_parent_keeps_no_child() -> None:
    def fn(parent: LocalCommunicator) -> None:
        child = weakref.ref(parent.duplicate())
        gc.collect()
        assert child() is None
        parent.abort_family("the test ends")

    run_ranks(2, fn)


def test_children_outlive_a_parent_that_was_closed() -> None:
    def fn(parent: LocalCommunicator) -> None:
        child = parent.duplicate()
        parent.close()
        child.barrier_on_host()
        child.close()

    run_ranks(2, fn)
