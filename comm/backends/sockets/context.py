"""What keeps the messages of the communicators apart that share sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_kernels.comm.failures.failure import PeerError


class Context:
    """One communicator's part of the sockets; MPI has the word for what distinguishes the messages of communicators.

    Args:
        number: 64 bits that all ranks agree on, and that no other context of their sockets has.
        members: by rank of the communicator, the rank as the loop numbers it.
        sent: called with the bytes of each message that this rank sends.

    Attributes:
        moved: bytes of its messages that have left or arrived.
        stripes: sockets between two ranks that it uses, the first ones.
        split: bytes from which on a message is cut over these.
        departed: why ranks of the loop have left it, as they reported.
    """

    def __init__(self, number: int, members: Sequence[int], sent: Callable[[int], None]) -> None:
        self.number = number
        self.members = members
        self.sent = sent
        self.moved = 0
        self.stripes = self.split = 1
        self.departed: dict[int, str] = {}

    def use(self, stripes: int, split: int) -> None:
        """Cuts messages of at least `split` bytes over the first `stripes` sockets; others take the least busy of these."""
        self.stripes, self.split = stripes, split

    def number_of(self, operation: int) -> int:
        """Returns the number of an operation among those of all contexts."""
        return self.number << 64 | operation

    def rank_of(self, peer: int) -> int:
        """Returns the communicator's rank by the loop's."""
        return self.members.index(peer)

    def broken(self, peer: int, reason: str) -> PeerError:
        """Returns the error of a rank of the loop whose connection broke."""
        rank = self.rank_of(peer)
        return PeerError(rank, f"the connection to rank {rank} broke: {reason}")

    def left(self, peer: int) -> PeerError:
        """Returns the error of a rank of the loop that has left this context."""
        rank = self.rank_of(peer)
        return PeerError(rank, f"rank {rank} has left the communicator: {self.departed[peer]}")
