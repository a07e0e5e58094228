"""The exceptions of this package, apart from the `TypeError` and `ValueError` of a wrong argument."""

from __future__ import annotations

from collections.abc import Sequence


class BackendUnavailableError(RuntimeError):
    """No kernel backend can serve a tensor; the message lists what each backend lacks and how to install it."""


class CommunicationError(RuntimeError):
    """A collective failed; the message names the operation and, where it is known, the rank at fault."""


class RankLostError(CommunicationError):
    """One or more ranks died or stopped answering.

    Attributes:
        ranks: the lost ranks, in ascending order, numbered in the communicator that raised the error.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class CollectiveTimeoutError(CommunicationError):
    """A collective did not finish within its timeout although every rank still answers.

    Attributes:
        ranks: the ranks that had not entered the collective, in ascending order; empty where that is not known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))
