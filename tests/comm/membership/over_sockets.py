"""Members that are threads, joined by sockets, which processes may join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bagua_kernels.comm import LocalCommunicator, Membership
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.transports import EpochTransport


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


def ends(members: Membership) -> None:
    """Ends all members that are left, in order."""
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
