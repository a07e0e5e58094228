"""A mailbox of ranks with GPUs: tensors by grouped sends and receives, letters by another mailbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.mailbox import Mailbox, lost_error
from bagua_kernels.comm.work import Work
from bagua_kernels.errors import CommunicationError

_TAGS = 1 << 31
_PAUSE = 0.001  # seconds between two looks at exchanges that are under way when the rank leaves


class DeviceMailbox(Mailbox):
    """The mailbox of ranks whose tensors move by a communicator over NCCL, through CuPy or PyTorch.

    An exchange is one group of sends and receives. `wait` makes the current stream wait, as with the communicator's other
    operations. NCCL ignores numbers: it matches messages of two ranks by their order. It also runs the exchanges of a rank
    one after the other, and a message waits for its receiver. Therefore all ranks must start their exchanges in one order,
    such as that of rounds.

    A rank that is lost ends the tensors of all ranks, because NCCL's communicator does not survive it. Exchanges then raise
    its error. Letters go on.

    Args:
        tensors: a communicator that nothing else uses; the mailbox owns it from now on.
        letters: a mailbox of the same ranks, which the mailbox owns too.
    """

    def __init__(self, tensors: Communicator, letters: Mailbox) -> None:
        self.rank, self.size, self.device, self.timeout = tensors.rank, tensors.size, tensors.device, tensors.timeout
        self._tensors = tensors
        self._letters = letters
        self._below = 0
        # Two threads that start exchanges must not mix their groups.
        self._starting = threading.Lock()
        self._waited: list[Work] = []

    @property
    def bytes_sent(self) -> int:
        """See `Mailbox.bytes_sent`."""
        return self._tensors.bytes_sent + self._letters.bytes_sent

    def wake(self) -> None:
        """See `Mailbox.wake`."""
        self._letters.wake()

    def lost(self) -> dict[int, str]:
        """See `Mailbox.lost`."""
        return dict(self._letters.lost())

    def leave(self, reason: str = "", culprits: Collection[int] = ()) -> None:
        """See `Mailbox.leave`; exchanges that were waited for are finished on the GPU before, within the timeout."""
        if self._unusable():
            return
        self._letters.leave(reason, culprits)
        deadline = time.monotonic() + self.timeout
        while self._under_way([]) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        self._tensors.abort(self._unusable())

    def _unusable(self) -> str:
        return self._letters._unusable()

    def _exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], number: int) -> Work:
        if number < self._below:
            raise ValueError(f"expected a number from {self._below} on, which `drop` set, got {number}")
        lost = self.lost()
        if partners := [peer for peer in {*outputs, *inputs} if peer in lost]:
            return Failed(lost_error(f"exchange #{number}", partners, lost))
        try:
            with self._starting:
                return DeviceMailboxWork(self, self._tensors.neighbour_exchange(outputs, inputs, number % _TAGS))
        except CommunicationError as error:
            return Failed(error)

    def _post(self, dst: int, letter: bytes) -> None:
        self._letters._post(dst, letter)

    def _take(self, timeout: float, known: Mapping[int, str] | None) -> tuple[int, bytes] | None:
        return self._letters._take(timeout, known)

    def _drop(self, ranks: frozenset[int], below: int) -> None:
        # Nothing is kept of tensors: a send waits for its receive.
        self._below = max(below, self._below)
        self._letters._drop(ranks, below)

    def _under_way(self, waited: list[Work]) -> bool:
        """Adds works that were waited for; returns True if the GPU has not finished all of them."""
        with self._starting:
            self._waited = [work for work in (*self._waited, *waited) if not work.is_completed()]
            return bool(self._waited)


class Failed(Work):
    """An exchange that could not be started."""

    def __init__(self, error: CommunicationError) -> None:
        self._error = error

    def wait(self) -> None:
        """Raises."""
        raise self._error

    def is_completed(self) -> bool:
        """Returns True."""
        return True


class DeviceMailboxWork(Work):
    """An exchange of a communicator, which the mailbox finishes before it leaves once it has been waited for."""

    def __init__(self, mailbox: DeviceMailbox, work: Work) -> None:
        self._mailbox = mailbox
        self._work = work

    def wait(self) -> None:
        """See `Work.wait`."""
        self._work.wait()
        self._mailbox._under_way([self._work])

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()

    def count_from(self, started: float | None = None) -> None:
        """See `Work.count_from`."""
        self._work.count_from(started)
