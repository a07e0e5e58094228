"""Which mailbox the ranks of a communicator use."""

from __future__ import annotations

import weakref
from typing import Any

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.mailbox import LocalMailbox
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.nccl.mailbox import DeviceMailbox
from bagua_kernels.comm.backends.nccl.unique_ids import LetterIds
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.mailbox import Mailbox


def open_mailbox(communicator: Communicator, *, lasting: bool = True) -> Mailbox:
    """Opens a mailbox of the same ranks, with the communicator's device and timeout; every rank calls it.

    The communicator is needed for the start only. Its failure or its end do not concern the mailbox. Ranks on GPUs exchange
    tensors by a duplicate of it, and letters by sockets.

    Args:
        communicator: of the ranks.
        lasting: False if `comm.shutdown` leaves it, True if it goes on afterwards.

    Raises:
        CommunicationError: if the ranks cannot connect.
    """
    communicator = communicator.flat
    communicator._check_usable()
    if isinstance(communicator, LocalCommunicator):
        return LocalMailbox(communicator)
    mailbox = _opened(communicator)
    if not lasting:
        _passing[mailbox] = _job(communicator)
    return mailbox


def leave_mailboxes(communicator: Communicator, reason: str) -> None:
    """Leaves what is open of the mailboxes of a communicator and of its relatives that were opened with `lasting=False`."""
    if isinstance(communicator, LocalCommunicator):
        return
    for mailbox, job in list(_passing.items()):
        if job is _job(communicator):
            mailbox.leave(reason)


# With what the communicators of a job have in common.
_passing: weakref.WeakKeyDictionary[Mailbox, Any] = weakref.WeakKeyDictionary()


def _job(communicator: Communicator) -> Any:
    session = getattr(communicator, "session", None)
    return None if session is None else session.liveness


def _opened(communicator: Communicator) -> Mailbox:
    host = _host(communicator)
    if communicator.device.type == "cpu":
        return SocketMailbox(communicator, host=host)
    tensors = communicator.duplicate()
    try:
        return DeviceMailbox(tensors, SocketMailbox(communicator, host=host, tensors=False))
    except BaseException as error:
        tensors.abort(f"its mailbox could not be opened: {error}")
        raise


def _host(communicator: Communicator) -> str:
    """Returns the address at which a communicator's ranks listen; empty for the default."""
    if isinstance(communicator, StripedCommunicator):
        return communicator._host or _host(communicator.base)
    if isinstance(communicator, NcclCommunicator) and isinstance(communicator._ids, LetterIds):
        return _host(communicator._ids.letters)
    return communicator._group.host if isinstance(communicator, TorchCommunicator) else ""
