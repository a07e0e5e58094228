"""The opening of a communicator's connections: one limit for all of it, and the ranks at fault where it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from bagua_kernels.comm.failures.failure import is_timeout
from bagua_kernels.comm.failures.heartbeat import OPENING
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining.bounded import bounded
from bagua_kernels.errors import BackendUnavailableError, CommunicationError

T = TypeVar("T")

_OPERATION = "connect"


class _EndedError(Exception):
    """Waiting makes no sense any more: a rank is lost, or this one has given up."""


def connect(
    session: Session,
    call: Callable[[threading.Event], T],
    look: Callable[[], object] | None = None,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Returns what opens the connections of a communicator, and reads the heartbeats meanwhile.

    Args:
        session: of the communicator.
        call: connects this rank with the others; it runs on a thread of its own and may never come back. Its argument is an
            event that is set when nobody waits any more.
        look: called again and again meanwhile; what it raises ends the wait.
        undo: gets what the call returns after nobody has waited any more.

    Raises:
        RankLostError: if a rank is lost or has given up; it is named.
        CollectiveTimeoutError: if ranks are late; they are named.
        CommunicationError: if it failed otherwise.
        BackendUnavailableError: if a rank lacks a library.
    """
    liveness = session.liveness
    if liveness is not None:
        liveness.entered(session.name, OPENING, _OPERATION)

    def glance() -> None:
        if session.ended or session.reported():
            raise _EndedError
        if look is not None:
            look()

    try:
        made = bounded(call, session.left(time.monotonic()), glance, undo)
    except _EndedError:
        if session.ended and session.failed is None:
            raise CommunicationError(f"{_OPERATION} was given up: {session.ended}") from None
        raise session.failure(_OPERATION, OPENING, None, None, timed_out=False) from None
    except (CommunicationError, BackendUnavailableError) as error:
        _tell(session, error)
        raise
    except TimeoutError:
        raise session.failure(_OPERATION, OPENING, None, None, timed_out=True) from None
    except RuntimeError as error:
        failure = session.failure(_OPERATION, OPENING, None, error, timed_out=is_timeout(error))
        if not getattr(failure, "ranks", ()):
            _tell(session, error)
        raise failure from error
    except BaseException as error:
        _tell(session, error)
        raise
    if liveness is not None:
        liveness.finished(session.name, OPENING)
    return made


def _tell(session: Session, error: BaseException) -> None:
    """Reports it to the other ranks, which would wait for this one until their time is over."""
    if session.liveness is not None:
        session.liveness.gave_up(
            session.name, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        )
