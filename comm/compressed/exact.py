"""How the exact part of a vector travels beside its payloads."""

from __future__ import annotations

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.quotient import divide_

_ROW_BYTES = 16


class ExactPart:
    """A short vector that is averaged without compression: each rank owns one chunk.

    The chunks are added to the rows of other messages. In one pass every rank sends each owner its chunk (`scatter`), and owners
    compute the mean (`reduce`). In the other pass they send the mean to all ranks (`gather`). A rank thus sends each element
    2 (P - 1) / P times, with P ranks. Sums are in float32, in the order of the ranks.

    Args:
        communicator: the ranks.
        n: elements of the part.
        dtype: of the part.

    Attributes:
        row_bytes: bytes that it adds to a row, a multiple of 16; 0 if there is no part.
        gathered_bytes: bytes of a row if every rank sent all of it to all others.
    """

    def __init__(self, communicator: Communicator, n: int, dtype: torch.dtype) -> None:
        size, unit = communicator.size, _ROW_BYTES // dtype.itemsize
        self._n = n
        self._dtype = dtype
        chunk = -(-n // (size * unit)) * unit
        self.row_bytes = chunk * dtype.itemsize
        self.gathered_bytes = -(-n // unit) * _ROW_BYTES
        # Filled up with zeros to full chunks.
        self._chunks = torch.zeros((size, chunk), dtype=dtype, device=communicator.device)

    def scatter(self, exact: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes each owner's chunk of `exact` to its row of `rows`, of shape (ranks, row_bytes), uint8."""
        if self._n:
            self._chunks.view(-1)[: self._n].copy_(exact)
            rows.view(self._dtype).copy_(self._chunks)

    def reduce(self, rows: torch.Tensor, own: torch.Tensor) -> None:
        """Writes the mean of all ranks' chunks, of shape (ranks, row_bytes), to `own`, of shape (row_bytes,)."""
        if self._n:
            own.view(self._dtype).copy_(mean_of(rows.view(self._dtype)))

    def gather(self, rows: torch.Tensor, exact: torch.Tensor) -> None:
        """Puts `exact` together from all owners' rows, of shape (ranks, row_bytes)."""
        if self._n:
            self._chunks.copy_(rows.view(self._dtype))
            exact.copy_(self._chunks.view(-1)[: self._n])


def mean_of(rows: torch.Tensor) -> torch.Tensor:
    """The mean of rows, float32, added up one by one, so that all devices and ranks get the same bits."""
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row
    return divide_(total, len(rows))
