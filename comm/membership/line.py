"""What carries the letters of members, and what their communicators are split from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_kernels.comm.backends.mailboxes import open_mailbox
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.mailbox.courier import Courier


class MemberLine:
    """The connections among some members, of which some may be lost by now.

    Attributes:
        names: of the members, by rank of the anchor.
        epoch: in which they connected.
        anchor: a communicator of these, for splits alone.
        courier: of the letters.
        mailbox: of the courier.
    """

    def __init__(self, anchor: Communicator, names: Sequence[int], epoch: int) -> None:
        """Opens a mailbox; collective over the anchor's ranks. `begin` starts the courier."""
        self.names, self.anchor, self.epoch = tuple(names), anchor, epoch
        self.mailbox = open_mailbox(anchor)
        self.courier = Courier(self.mailbox, "membership")

    def begin(
        self, handlers: Sequence[tuple[int, Callable[[int, bytes], None]]], work: Callable[[], bool], owner: object
    ) -> None:
        """Starts the courier.

        Args:
            handlers: for each kind of letters what is called with the name of the sender and the contents.
            work: called again and again on the courier's thread.
            owner: the courier ends with it.
        """
        for kind, handler in handlers:
            self.courier.on(kind, _named(self.names, handler))
        self.courier.work(work)
        self.courier.end_with(owner)
        self.courier.start()

    def has(self, name: int) -> bool:
        """Returns True if a member has this line, too."""
        return name in self.names

    def rank_of(self, name: int) -> int:
        """Returns the rank of a member in the mailbox."""
        return self.names.index(name)

    def communicator(self, names: Sequence[int]) -> Communicator:
        """Returns a communicator of some members, each of which calls this; sends nothing."""
        return self.anchor._split(tuple(self.rank_of(name) for name in names))

    def end(self, reason: str) -> None:
        """Leaves the mailbox, and gives up the connections."""
        self.courier.end(reason)
        self.anchor.abort(reason)


def _named(names: Sequence[int], handler: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
    return lambda sender, body: handler(names[sender], body)
