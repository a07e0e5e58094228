"""Members that are threads, joined by sockets, which processes may join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.transports import EpochTransport
from tests import limits


@contextmanager
def listening(
    communicator: LocalCommunicator,
    secret: Secret,
    doors: dict[int, tuple[str, int]],
    transport: EpochTransport | None = None,
) -> Iterator[Membership]:
    """In the block this rank is a member, whose address is noted."""
    striped = StripedCommunicator(communicator, stripes=1, host="127.0.0.1")
    try:
        members = Membership(striped, secret=secret, transport=transport)
        members.listen("127.0.0.1", 0)
        assert members.address is not None
        doors[members.name] = members.address
        yield members
    finally:
        striped.abort("the test ends")


def with_joiner(
    ranks: int, secret: Secret, trains: Callable[[Membership, threading.Thread], None], seconds: float
) -> None:
    """Runs a program on some ranks, and on a process that asks rank 0 to let it join.

    Args:
        ranks: their number at first.
        secret: of the job.
        trains: the program; it starts the thread that it gets once, which is that of the new process.
        seconds: for an operation, and for the new process to come to its end.
    """
    doors: dict[int, tuple[str, int]] = {}

    def member(communicator: LocalCommunicator) -> None:
        with listening(communicator, secret, doors) as members:
            trains(members, thread)

    def joins() -> None:
        trains(arrive([doors[0]], secret, limits.seconds(seconds)), thread)

    thread = threading.Thread(target=joins, daemon=True)
    run_ranks(ranks, member, timeout=limits.seconds(seconds))
    thread.join(limits.seconds(seconds))


def ends(members: Membership) -> None:
    """Ends all members that are left, in order."""
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
