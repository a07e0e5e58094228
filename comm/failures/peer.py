"""Errors of a transport that name the other rank at which an operation failed."""

from __future__ import annotations

MATCH = (
    "all ranks must issue the same operations with the same sizes in the same order (if ranks have different numbers of "
    "batches, use `model.join()`)"
)


class PeerError(ConnectionError):
    """Something went wrong with one other rank.

    Attributes:
        peer: which one.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class MismatchPeerError(PeerError):
    """Another rank's call does not fit this one's.

    Attributes:
        theirs: what the other rank did.
        ours: what this rank did.
    """

    def __init__(self, peer: int, theirs: str, ours: str) -> None:
        super().__init__(peer, f"rank {peer} {theirs} where this rank {ours}: {MATCH}")
        self.theirs = theirs
        self.ours = ours
