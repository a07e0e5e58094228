"""The two halves of which collectives are made: payloads to the owners of chunks, and payloads to everyone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.contract import Deliver, Source
from bagua_kernels.comm.compressed.layout import Layout, first_seed, length, second_seed
from bagua_kernels.comm.compressed.residuals import Residuals
from bagua_kernels.comm.work import FINISHED, Work
from bagua_kernels.compression import BlockCodec, Codec


class Slots:
    """Memory for the messages of two pieces at a time: rows of one size a piece, each beginning at a multiple of 16 bytes.

    Args:
        rows: rows of a message.
        sizes: for each piece, the bytes of a row, a multiple of 16.
        device: where.
    """

    def __init__(self, rows: int, sizes: Sequence[int], device: torch.device) -> None:
        self._rows = rows
        self._sizes = sizes
        # Zeros, so that bytes which only fill a row up are no secrets of whoever used the memory before.
        self._memory = [
            torch.zeros(rows * max(sizes[first::2], default=0), dtype=torch.uint8, device=device)
            for first in range(min(2, len(sizes)))
        ]

    def __getitem__(self, piece: int) -> torch.Tensor:
        """The message of a piece, shape (rows, bytes), uint8; it is that of the piece after the next one, too."""
        size = self._sizes[piece]
        return self._memory[piece % 2][: self._rows * size].view(self._rows, size)


def encodes_pieces(codec: Codec) -> bool:
    """Whether a codec makes of many tensors what it makes of one vector of them."""
    return isinstance(codec, BlockCodec) and type(codec).encode is BlockCodec.encode


class Scatter:
    """First pass: each rank encodes all chunks of its vector and sends each to its owner, piece by piece.

    Args:
        codec: what encodes.
        communicator: the ranks.
        layout: how vectors are cut, with one owner a rank.
        residual: whether to keep what payloads lack, and add it to the next vector.
    """

    def __init__(self, codec: Codec, communicator: Communicator, layout: Layout, residual: bool) -> None:
        self._codec, self._communicator, self._layout = codec, communicator, layout
        size, device = communicator.size, communicator.device
        everything = [(piece, owner) for owner in range(size) for piece in range(layout.pieces)]
        self._bytes = {(p, o): codec.payload_size(length(layout.part(p, o))) for p, o in everything}
        # Every row has room for the piece of a full chunk, so that short last chunks need no messages of uneven rows.
        slots = [codec.payload_size(layout.width(piece)) for piece in range(layout.pieces)]
        self._sent = Slots(size, slots, device)
        self._received = Slots(size, slots, device)
        self._works: list[Work] = [FINISHED, FINISHED]
        parts = [(layout.number(p, o), length(layout.part(p, o))) for p, o in everything]
        self.residuals = Residuals(codec, parts, device) if residual else None

    def start(self, piece: int, x: torch.Tensor, seed: int, source: Source | None = None) -> None:
        """Encodes one piece of each chunk of `x`, of shape (n,), or of what `source` gives, and starts sending it."""
        layout, sent = self._layout, self._sent[piece]
        for owner in range(layout.owners):
            part, number = layout.part(piece, owner), layout.number(piece, owner)
            out = sent[owner, : self._bytes[piece, owner]]
            own = first_seed(self._codec, seed, self._communicator.rank, number)
            if not length(part):
                continue
            if source is not None and isinstance(self._codec, BlockCodec):
                self._codec.encode_pieces(source(part), seed=own, out=out)
            elif self.residuals is None:
                self._codec.encode(x[part], seed=own, out=out)
            else:
                self.residuals.encode(number, x[part], seed=own, out=out)
        received = self._received[piece]
        self._works[piece % 2] = self._communicator.all_to_all(received.view(-1), sent.view(-1))

    def finish(self, piece: int) -> torch.Tensor:
        """Waits for that piece of this rank's chunk, and returns everyone's payload of it, shape (ranks, bytes)."""
        self._works[piece % 2].wait()
        received, size = self._received[piece], self._bytes[piece, self._communicator.rank]
        return received if size == received.shape[1] else received[:, :size].contiguous()


class Gather:
    """Second pass: each rank encodes its chunk and sends that to everyone, piece by piece; all decode the same bytes.

    An exact part may travel with the first piece: so many bytes behind each payload.

    Args:
        codec: what encodes.
        communicator: the ranks.
        layout: how vectors are cut, with one owner a rank.
        residual: whether to keep what payloads lack, and add it to the next chunk.
        exact: elements of the exact part.
        dtype: of the exact part.
    """

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        layout: Layout,
        residual: bool,
        exact: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._codec, self._communicator, self._layout = codec, communicator, layout
        device, pieces = communicator.device, range(layout.pieces)
        self._bytes = {
            (p, o): codec.payload_size(length(layout.part(p, o))) for p in pieces for o in range(layout.owners)
        }
        slots = [codec.payload_size(layout.width(piece)) for piece in pieces]
        self._messages = Messages(communicator, slots, exact, dtype)
        own = [(layout.number(p, communicator.rank), length(layout.part(p, communicator.rank))) for p in pieces]
        self.residuals = Residuals(codec, own, device) if residual else None
        self._mean = torch.empty(0, dtype=torch.float32, device=device)

    def start_reduced(self, piece: int, payloads: torch.Tensor, exact: torch.Tensor, seed: int) -> None:
        """Encodes the mean of everyone's payloads of a piece of this rank's chunk, and starts sending it.

        Args:
            piece: its number.
            payloads: shape (ranks, bytes).
            exact: this rank's exact part.
            seed: of the message.
        """
        rank, scale = self._communicator.rank, 1.0 / self._communicator.size
        number, elements = self._layout.number(piece, rank), length(self._layout.part(piece, rank))
        own, out = second_seed(self._codec, seed, number), self._messages.own(piece)[: self._bytes[piece, rank]]
        if elements and self.residuals is None:
            self._codec.reduce(payloads, elements, scale=scale, seed=own, out=out)
        elif elements and self.residuals is not None:
            # With a residual the mean is needed as numbers before it is encoded. Only here: `start` has it from the caller.
            if not self._mean.numel():
                self._mean = torch.empty(self._layout.piece, dtype=torch.float32, device=payloads.device)
            mean = self._codec.decode_sum(payloads, self._mean[:elements], scale)
            self.residuals.encode(number, mean, seed=own, out=out)
        self._messages.start(piece, exact)

    def start(self, piece: int, shard: torch.Tensor, seed: int) -> None:
        """Encodes a piece of this rank's chunk, which is `shard`, and starts sending it."""
        rank, begin = self._communicator.rank, piece * self._layout.piece
        number, elements = self._layout.number(piece, rank), length(self._layout.part(piece, rank))
        own, out = second_seed(self._codec, seed, number), self._messages.own(piece)[: self._bytes[piece, rank]]
        part = shard[begin : begin + elements]
        if elements and self.residuals is None:
            self._codec.encode(part, seed=own, out=out)
        elif elements and self.residuals is not None:
            self.residuals.encode(number, part, seed=own, out=out)
        self._messages.start(piece, shard[:0])

    def finish(self, piece: int, x: torch.Tensor, exact: torch.Tensor, deliver: Deliver | None = None) -> None:
        """Waits for a piece of all chunks, and decodes it into its place in `x`, of shape (n,); `exact` gets its mean.

        With `deliver` that takes each part and its payload instead of `x`.
        """
        payloads = self._messages.finish(piece, exact)
        for owner in range(self._layout.owners):
            part, payload = self._layout.part(piece, owner), payloads[owner, : self._bytes[piece, owner]]
            if not length(part):
                continue
            if deliver is None:
                self._codec.decode(payload, x[part])
            else:
                deliver(part, payload)


class Messages:
    """All-gathers of one row of bytes a rank, of which the first may carry an exact part.

    Args:
        communicator: the ranks.
        sizes: for each piece, the bytes of a row.
        exact: elements of the exact part.
        dtype: of the exact part.
    """

    def __init__(self, communicator: Communicator, sizes: Sequence[int], exact: int, dtype: torch.dtype) -> None:
        self._communicator = communicator
        self._sizes = sizes
        self._exact_bytes = exact * dtype.itemsize
        rows = [size + (-(-self._exact_bytes // 16) * 16 if piece == 0 else 0) for piece, size in enumerate(sizes)]
        self._own = Slots(1, rows, communicator.device)
        self._all = Slots(communicator.size, rows, communicator.device)
        self._works: list[Work] = [FINISHED, FINISHED]

    def own(self, piece: int) -> torch.Tensor:
        """Where this rank's row of a piece is to be written, shape (bytes,)."""
        return self._own[piece][0, : self._sizes[piece]]

    def start(self, piece: int, exact: torch.Tensor) -> None:
        """Starts sending this rank's row, and with the first piece its exact part."""
        own = self._own[piece]
        if piece == 0 and self._exact_bytes:
            begin = self._sizes[0]
            own[0, begin : begin + self._exact_bytes].view(exact.dtype).copy_(exact)
        self._works[piece % 2] = self._communicator.all_gather(self._all[piece].view(-1), own.view(-1))

    def finish(self, piece: int, exact: torch.Tensor) -> torch.Tensor:
        """Waits for everyone's rows, shape (ranks, bytes), and leaves the mean of the exact parts in `exact`."""
        self._works[piece % 2].wait()
        everything, size = self._all[piece], self._sizes[piece]
        if piece == 0 and self._exact_bytes:
            total = torch.zeros_like(exact, dtype=torch.float32)
            for row in everything:
                total += row[size : size + self._exact_bytes].view(exact.dtype)
            exact.copy_(total.div_(self._communicator.size))
        return everything[:, :size]
