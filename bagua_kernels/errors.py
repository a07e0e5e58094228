"""The exceptions of this package, apart from the `TypeError` and `ValueError` of a wrong argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BackendUnavailableError(RuntimeError):
    """No kernel backend can serve a tensor; the message lists what each backend lacks and how to install it."""


class CommunicationError(RuntimeError):
    """A collective failed; the message names the operation and, where it is known, the rank at fault."""


class _WithRanks(CommunicationError):
    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets an error be copied, and sent to another process."""
        return type(self), (*self.args, self.ranks), self.__dict__


class RankLostError(_WithRanks):
    """One or more ranks died or stopped answering.

    Attributes:
        ranks: the lost ranks, in ascending order, numbered in the communicator that raised the error.
    """


class MismatchError(_WithRanks):
    """Ranks called operations that do not fit together, or with different sizes; nobody is lost.

    Attributes:
        ranks: the ranks whose calls differ, in ascending order; empty where that is not known.
    """


class LinkError(_WithRanks):
    """The connection between two ranks broke, although both still run.

    Attributes:
        ranks: the two ranks, in ascending order.
    """


class CollectiveTimeoutError(_WithRanks):
    """A collective did not finish within its timeout although every rank still answers.

    Attributes:
        ranks: the ranks that had not entered the collective, in ascending order; empty where that is not known.
    """


class MembershipError(CommunicationError):
    """This rank may not go on with the members that are left, or they went on without it; see `comm.init(elastic=True)`."""


class DeadlockError(AssertionError):
    """Threads under a `comm.Schedule` cannot go on; the message lists what each thread waits for.

    An assertion rather than a `CommunicationError`: the fault is in the program, and no handler of lost ranks catches it.
    """


class ReplicaError(RuntimeError):
    """What all ranks should have alike differs; the message has the first tensor that does. See `verify_every`.

    No `CommunicationError`: nobody is lost, and to go on with fewer ranks would not help.

    Attributes:
        ranks: those that differ from most others, in ascending order.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets an error be copied, and sent to another process."""
        return type(self), (*self.args, self.ranks), self.__dict__


class DivergenceError(RuntimeError):
    """An algorithm diverges; the message has the figures, the cause and the cure."""


def follow_up(error: BaseException, text: str) -> RuntimeError:
    """Returns an error of the same kind and with the same ranks as an earlier one, for operations that fail because of it.

    Args:
        error: the first one; anything but a `CommunicationError` becomes a RuntimeError.
        text: message of the new error.
    """
    if isinstance(error, _WithRanks):
        return type(error)(text, error.ranks)
    return CommunicationError(text) if isinstance(error, CommunicationError) else RuntimeError(text)


def culprits_of(error: BaseException | None) -> tuple[int, ...]:
    """Returns the ranks that an error names as lost or late; none for other errors, where nobody is to blame."""
    return error.ranks if isinstance(error, RankLostError | CollectiveTimeoutError) else ()
