"""Memory for messages, which the exchanges of one communicator share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from bagua_kernels.comm.communicator import Communicator


class MessageMemory:
    """Memory that an exchange takes when it begins, and gives back when it has ended.

    So many buckets need the memory of those few that are exchanged at the same time. On a GPU the allocator of PyTorch does the
    same for each stream, in the order of its work: nothing is kept here.

    Attributes:
        free: vectors of bytes that no exchange uses now.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Communicator, MessageMemory]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        """Begins without memory."""
        self.free: list[torch.Tensor] = []

    @classmethod
    def of(cls, communicator: Communicator) -> MessageMemory:
        """Returns the memory of a communicator, which lasts as long as the communicator."""
        found = cls._of.get(communicator)
        return cls._of.setdefault(communicator, cls()) if found is None else found

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Returns memory of at least so many bytes, with anything in it; shorter memory is replaced by it."""
        fitting = [each for each in self.free if each.numel() >= size]
        chosen = min(fitting or self.free, key=torch.Tensor.numel, default=None)
        if chosen is not None:
            self.free = [each for each in self.free if each is not chosen]
        return chosen if fitting and chosen is not None else torch.zeros(size, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Takes back what `take` has returned."""
        if memory.device.type == "cpu":
            self.free.append(memory)


class Slots:
    """Messages of two pieces at a time: rows of one size a piece, each beginning at a multiple of 16 bytes.

    They have memory within `lent`.
    """

    def __init__(self, rows: int, sizes: Sequence[int]) -> None:
        """Describes messages.

        Args:
            rows: rows of a message.
            sizes: for each piece, the bytes of a row, a multiple of 16.
        """
        self._rows = rows
        self._sizes = sizes
        self._most = [rows * max(sizes[first::2], default=0) for first in range(min(2, len(sizes)))]
        self._memory: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """The bytes of memory that they take."""
        return sum(self._most)

    def use(self, memory: torch.Tensor) -> None:
        """Takes memory of `nbytes` bytes."""
        self._memory = list(memory.split(self._most))

    def leave(self) -> None:
        """Drops the memory."""
        self._memory = []

    def __getitem__(self, piece: int) -> torch.Tensor:
        """The message of a piece, shape (rows, bytes), uint8; it is that of the piece after the next one, too."""
        size = self._sizes[piece]
        return self._memory[piece % 2][: self._rows * size].view(self._rows, size)


@contextlib.contextmanager
def lent(communicator: Communicator, slots: Sequence[Slots]) -> Iterator[None]:
    """Within this block messages have memory, which other exchanges of the communicator use afterwards.

    After an exception it is not used again: a message may be under way to it.
    """
    shared = MessageMemory.of(communicator)
    memory = shared.take(sum(each.nbytes for each in slots), communicator.device)
    end = 0
    for each in slots:
        begin, end = end, end + each.nbytes
        each.use(memory[begin:end])
    try:
        yield
        shared.give_back(memory)
    finally:
        for each in slots:
            each.leave()
