"""What moves between ranks: messages, the lanes that send and receive them, and the operation that these add up to."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from bagua_kernels.comm.backends.sockets.context import Context

Transfers = Generator["list[Transfer]", None, None]
_MESSAGES = 14  # bits of a tag that number a lane's messages to one rank; the others number the lane


class Transfer:
    """One message on its way.

    Attributes:
        lane: that issued it.
        peer: the rank at the other end, as the loop numbers it.
        data: the memory it is sent from or received into; None if it is received anywhere.
        own: the memory it was received in, if that was anywhere, from then on until it is given to `Lane.free`.
        left: parts of it that have not gone to the kernel; of one that is received, its bytes.
        done: True if all of it has gone to the kernel, or arrived.
        awaited: True if its lane cannot go on without it.
    """

    __slots__ = ("awaited", "data", "done", "lane", "left", "own", "peer")

    def __init__(self, lane: Lane, peer: int, data: memoryview | None, left: int) -> None:
        self.lane = lane
        self.peer = peer
        self.data = data
        self.own: torch.Tensor | None = None
        self.left = left
        self.done = False
        self.awaited = False

    @property
    def rank(self) -> int:
        """The rank at the other end, as its communicator numbers it."""
        context = self.lane.operation.context
        return self.peer if context is None else context.rank_of(self.peer)


class Carrier(Protocol):
    """Moves messages; used on its own thread only."""

    def send(self, lane: Lane, peer: int, tag: int, data: memoryview) -> Transfer: ...  # noqa: D102
    def receive(self, lane: Lane, peer: int, tag: int, data: memoryview | int) -> Transfer: ...  # noqa: D102
    def free(self, own: torch.Tensor) -> None: ...  # noqa: D102


class Lane:
    """Steps of a collective that follow one another, such as those of one piece of a vector.

    The steps are a generator. It calls `send`, `receive` and `receive_anywhere`, which start at once, and yields the transfers
    that it has to wait for. Messages of two ranks match in the order in which their lanes of the same number issue them.

    Attributes:
        tag: the lowest tag of its messages; the same on all ranks.
        code: that of the operation, unless the messages of different lanes differ.
    """

    __slots__ = ("_received", "_sent", "carrier", "code", "operation", "pending", "steps", "tag")

    def __init__(self, operation: Operation, number: int, carrier: Carrier) -> None:
        self.operation = operation
        self.carrier = carrier
        self.tag = number << _MESSAGES
        self.code = operation.code
        self.pending = 0
        self.steps: Transfers | None = None
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def send(self, peer: int, tensor: torch.Tensor) -> Transfer:
        """Sends a flat tensor, which has to stay as it is until the transfer is done."""
        count = self._sent[peer] = self._sent.get(peer, -1) + 1
        return self.carrier.send(self, peer, self.tag + count, memory(tensor))

    def receive(self, peer: int, tensor: torch.Tensor) -> Transfer:
        """Receives into a flat tensor."""
        count = self._received[peer] = self._received.get(peer, -1) + 1
        return self.carrier.receive(self, peer, self.tag + count, memory(tensor))

    def receive_anywhere(self, peer: int, like: torch.Tensor) -> Transfer:
        """Receives as many bytes as a tensor has; what they are in is `Transfer.own`, to be given to `free`.

        A rank that is ahead sends before it is asked. To move that would cost as much as to receive it.
        """
        count = self._received[peer] = self._received.get(peer, -1) + 1
        return self.carrier.receive(self, peer, self.tag + count, like.nbytes)

    def free(self, transfer: Transfer) -> None:
        """Lets memory be used again that was received anywhere and is not needed any more."""
        assert transfer.own is not None
        self.carrier.free(transfer.own)
        transfer.own = None

    def advance(self) -> bool:
        """Goes on to the next step that has to wait; returns True if all steps are done."""
        assert self.steps is not None
        for transfers in self.steps:
            self.pending = 0
            for transfer in transfers:
                if not transfer.done:
                    transfer.awaited = True
                    self.pending += 1
            if self.pending:
                return False
        return True


@dataclass(eq=False, repr=False)
class Operation:
    """A collective, or one message, under way; its face to the waiting thread is that of torch's work.

    Args:
        name: for errors.
        number: the same on all ranks, and no other operation's of its loop; see `Context.number_of`.
        code: detects calls that differ between ranks; see `signature`.
        lanes: the steps of each lane, which are started in this order, `window` at a time.
        window: how many lanes may be under way at once.
        brief: True if its first steps take no longer than handing them to another thread.
        owner: kept alive until the operation has ended.
        context: of its communicator; None for the only one of its loop.

    Attributes:
        missing: returns the ranks with which a message is under way.
        moved: bytes of it that have left or arrived.
    """

    name: str
    number: int
    code: int
    lanes: Iterator[Callable[[Lane], Transfers]]
    window: int
    brief: bool = False
    owner: object = None
    context: Context | None = None

    def __post_init__(self) -> None:
        self.active = 0
        self.started = 0
        self.moved = 0
        self.error: BaseException | None = None
        self.missing: Callable[[], list[int]] = list
        self._ended = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        """Wakes who waits; only the first call counts."""
        if not self._ended.is_set():
            self.error = error
            self.owner = None
            self.missing = list
            self.lanes = iter(())
            self._ended.set()

    def is_completed(self) -> bool:
        """Returns True if it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, limit: timedelta) -> None:
        """Waits until it has ended.

        Raises:
            RuntimeError: if it has failed, or not ended in time.
        """
        if not self._ended.wait(limit.total_seconds()):
            raise RuntimeError(f"{self.name} is still under way")
        if self.error is not None:
            raise RuntimeError(f"{self.error}") from self.error


NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
)
_SIZE = 40  # bits of a signature that hold the bytes of the call


def signature(name: str, *arguments: object, nbytes: int = 0) -> int:
    """Returns 64 bits that tell calls apart: which operation it is, a digest of what all ranks must agree on, its size.

    Args:
        name: of the operation.
        arguments: on which all ranks must agree.
        nbytes: of the tensor; 0 where ranks may have different ones.
    """
    digest = zlib.crc32("/".join(map(str, arguments)).encode()) & 0xFFFF
    return (NAMES.index(name) << 16 | digest) << _SIZE | nbytes & (1 << _SIZE) - 1


def mismatch(theirs: int, ours: int) -> tuple[str, str]:
    """Returns what to say of two signatures that differ: what the other rank called, and what this one did."""
    numbers = [code >> _SIZE + 16 for code in (theirs, ours)]
    names = [NAMES[number] if number < len(NAMES) else "something unknown" for number in numbers]
    sizes = [code & (1 << _SIZE) - 1 for code in (theirs, ours)]
    said = [f"called {name}" + f" of {size} bytes" * bool(size) for name, size in zip(names, sizes, strict=True)]
    if said[0] == said[1]:
        said[0] += " with another dtype, option, root or tuning"
    return said[0], said[1]


def wrong_size(theirs: int, ours: int, name: str) -> tuple[str, str]:
    """Returns the descriptions of a message of unexpected length, for each of the two ranks."""
    return f"sent {theirs} bytes", f"expected {ours} in its {name}"


def memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor, shared with it."""
    # A tensor of one element is contiguous whatever its stride, but only a stride of 1 can be viewed as bytes.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(bytearray())
