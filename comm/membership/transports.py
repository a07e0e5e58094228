"""What makes the communicator of an epoch, out of the connections that its members have on their CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bagua_kernels.comm.backends.nccl.binding import Runtime
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.membership.line import MemberLine
from bagua_kernels.errors import MembershipError

_PATIENCE = 10.0  # seconds for a GPU to come to the end of what was aborted


class EpochTransport(Protocol):
    """What makes the communicators of epochs; one object for each member, which all have the same kind.

    Attributes:
        tensors: the type of device on which tensors are, as "cpu"; the same at all members.
    """

    tensors: str

    def communicator(self, line: MemberLine, names: Sequence[int], look: Callable[[], object]) -> Communicator:
        """Returns the communicator of an epoch; collective.

        Args:
            line: connections of the members, which last.
            names: of the members.
            look: called again and again during waits for other members; what it raises ends the wait.

        Raises:
            MembershipError: this member cannot go on.
            CommunicationError: another member is lost, or the epoch ends as it begins.
        """

    def interrupt(self, communicator: Communicator, reason: str) -> None:
        """Ends the waits of an epoch's communicator, on any thread, and those of its splits that would not end by themselves."""


class LineTransport:
    """By the connections themselves: making a communicator sends nothing."""

    tensors = "cpu"

    def communicator(self, line: MemberLine, names: Sequence[int], look: Callable[[], object]) -> Communicator:
        """See `EpochTransport.communicator`."""
        return line.communicator(names)

    def interrupt(self, communicator: Communicator, reason: str) -> None:
        """See `EpochTransport.interrupt`: a connection that breaks ends what waits for it, and the rest may finish."""
        communicator.abort(reason)


class NcclTransport:
    """By NCCL: each epoch has a new communicator, whose unique id its members get over their connections.

    NCCL's communicator does not survive the loss of a rank. It is aborted, which ends what hangs on the GPU. Its memory may be
    used again once the GPU has come to the end of all of that.

    Args:
        device: the GPU of this member.
        runtime: its libraries; by default those of this process.
    """

    tensors = "cuda"

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self._device, self._runtime = device, runtime
        self._last: NcclCommunicator | None = None

    def communicator(self, line: MemberLine, names: Sequence[int], look: Callable[[], object]) -> Communicator:
        """See `EpochTransport.communicator`."""
        # First, for all members have to make as many of the same names.
        letters = line.communicator(names)
        try:
            self._await_last()
        except BaseException as error:
            letters.abort(f"{error}")
            raise
        self._last = None
        self._last = NcclCommunicator.beside(letters, device=self._device, runtime=self._runtime, look=look)
        return self._last

    def interrupt(self, communicator: Communicator, reason: str) -> None:
        """See `EpochTransport.interrupt`: NCCL waits for a lost rank for ever."""
        communicator.abort_family(reason)

    def _await_last(self) -> None:
        """Waits until the GPU has come to the end of the epoch before.

        Raises:
            MembershipError: it does not, or has failed.
        """
        if self._last is None:
            return
        try:
            if self._last.await_idle(_PATIENCE):
                return
            problem = f"it still runs what was aborted {_PATIENCE:g} s ago"
        except RuntimeError as error:
            problem = f"it has failed: {error}"
        raise MembershipError(
            f"the GPU {self._device} cannot go on: {problem}; let this process end, and another one join in its place"
        )
