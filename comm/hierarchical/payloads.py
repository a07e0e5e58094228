"""The payloads of a shard's mean, as the ranks of a node share them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua_kernels.comm.compressed import Deliver
from bagua_kernels.comm.compressed.layout import Layout, length
from bagua_kernels.comm.compressed.phases import works_in_rows
from bagua_kernels.compression import BlockCodec, Codec
from bagua_kernels.launchers.blockwise import Rows


class ShardPayloads:
    """Where the payloads of a shard's parts lie in one row of bytes, the same on all ranks.

    The owners of a shard encode a chunk of its mean each, in pieces (`CompressedAllReduce`). The row has one slot for each owner,
    piece by piece.

    Attributes:
        nbytes: of the row.
    """

    def __init__(self, codec: Codec, elements: int, owners: int) -> None:
        """Lays out the row.

        Args:
            codec: what encodes the mean.
            elements: of the shard.
            owners: of the shard.
        """
        self._codec = codec
        self._layout = layout = Layout.cut(codec, elements, owners)
        self._slots = [codec.payload_size(layout.width(piece)) if elements else 0 for piece in range(layout.pieces)]
        self._parts = {
            (part.start, part.stop): (piece, owner)
            for piece in range(layout.pieces)
            for owner in range(owners)
            if length(part := layout.part(piece, owner))
        }
        self.nbytes = owners * sum(self._slots)

    def collect(self, row: torch.Tensor) -> Deliver:
        """Returns what stores the payload of each part in a row, shape (nbytes or more,), uint8."""

        def deliver(part: slice, payload: torch.Tensor) -> None:
            piece, owner = self._parts[part.start, part.stop]
            self._rows(row, piece)[owner, : payload.numel()].copy_(payload)

        return deliver

    def decode(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the mean to `out`, shape (elements,)."""
        layout = self._layout
        if works_in_rows(self._codec) and layout.n:
            assert isinstance(self._codec, BlockCodec)
            for piece in range(layout.pieces):
                begin = min(piece * layout.piece, layout.n)
                rows = Rows(layout.n - begin, layout.chunk, layout.width(piece), layout.owners)
                self._codec.decode_rows(self._rows(row, piece), out[begin:], rows)
            return
        for part, payload in self._payloads(row):
            self._codec.decode(payload, out[part])

    def hand_out(self, row: torch.Tensor, start: int, deliver: Deliver) -> None:
        """Gives each part's payload to `deliver`.

        Args:
            row: of the shard.
            start: the place of the shard's first element in the vector.
            deliver: takes a part of the vector and its payload.
        """
        for part, payload in self._payloads(row):
            deliver(slice(part.start + start, part.stop + start), payload)

    def _payloads(self, row: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for (begin, end), (piece, owner) in self._parts.items():
            yield slice(begin, end), self._rows(row, piece)[owner, : self._codec.payload_size(end - begin)]

    def _rows(self, row: torch.Tensor, piece: int) -> torch.Tensor:
        """The slots of a piece, shape (owners, bytes)."""
        owners, slot = self._layout.owners, self._slots[piece]
        begin = owners * sum(self._slots[:piece])
        return row[begin : begin + owners * slot].view(owners, slot)
