"""The two halves of which collectives are made: payloads to the owners of chunks, and payloads to everyone."""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import Deliver, Source
from bagua_kernels.comm.compressed.counts import Counts
from bagua_kernels.comm.compressed.exact import ExactPart
from bagua_kernels.comm.compressed.layout import Layout, first_seed, length, second_seed
from bagua_kernels.comm.compressed.memory import Slots
from bagua_kernels.comm.compressed.residuals import Residuals
from bagua_kernels.comm.work import FINISHED, Steps, Work
from bagua_kernels.compression import BlockCodec, Codec
from bagua_kernels.launchers.blockwise import Rows


def encodes_pieces(codec: Codec) -> bool:
    """True if a codec makes of many tensors what it makes of one vector of them."""
    return isinstance(codec, BlockCodec) and type(codec).encode is BlockCodec.encode


def works_in_rows(codec: Codec) -> bool:
    """True if a codec encodes and decodes the chunks of a vector together."""
    kind = type(codec)
    return isinstance(codec, BlockCodec) and (kind.encode, kind.decode) == (BlockCodec.encode, BlockCodec.decode)


def encode_part(
    codec: Codec, x: torch.Tensor, *, seed: int, out: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Encodes a part of a vector."""
    if isinstance(codec, BlockCodec):
        codec.encode(x, seed=seed, out=out, counts=counts)
    else:
        codec.encode(x, seed=seed, out=out)


class Pass(abc.ABC):
    """What both passes have: payloads of pieces of chunks, maybe with residuals, and the exact part beside the first piece.

    Args:
        codec: what encodes.
        communicator: the ranks.
        layout: how vectors are cut, with one owner a rank.
        residual: True to keep what payloads lack, and add it to the next vector.
        exact: how the exact part travels; None if there is none.
        counts: which elements are tensors' own; None if the vector is one tensor.

    Attributes:
        residuals: what payloads lacked; None if it is not kept.
        slots: the messages, which need memory while a vector is under way (`lent`).
    """

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        layout: Layout,
        residual: bool,
        exact: ExactPart | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._codec, self._communicator, self._layout = codec, communicator, layout
        self._exact = exact
        self._counts = counts or Counts(codec, layout.n, None, communicator.device)
        self._in_rows = works_in_rows(codec)
        pieces = range(layout.pieces)
        self._bytes = {
            (p, o): codec.payload_size(length(layout.part(p, o))) for p in pieces for o in range(layout.owners)
        }
        # Every row has room for the piece of a full chunk, so that short last chunks need no messages of uneven rows.
        self._slots = [codec.payload_size(layout.width(piece)) for piece in pieces]
        parts = [(layout.number(p, o), length(layout.part(p, o))) for o in self._encoded() for p in pieces]
        self.residuals = Residuals(codec, parts, communicator.device) if residual else None
        # Bytes behind short payloads, in each piece's rows: they travel, and must not contain another message's.
        self._pads = [
            [(o, self._bytes[p, o]) for o in range(layout.owners) if self._bytes[p, o] < self._slots[p]] for p in pieces
        ]
        self.slots = self._prepare(communicator, 0 if exact is None else exact.row_bytes)

    @abc.abstractmethod
    def _encoded(self) -> Sequence[int]:
        """Returns the owners whose chunks this rank encodes."""

    @abc.abstractmethod
    def _prepare(self, communicator: Communicator, extra: int) -> list[Slots]:
        """Makes the messages, of which the first carries `extra` bytes more in each row."""

    def _encode(self, piece: int, owner: int, part: torch.Tensor, seed: int, out: torch.Tensor) -> None:
        """Encodes a piece of an owner's chunk, with its residual if there is one; an empty one not."""
        if not part.numel():
            return
        counts = self._counts.of(self._layout.part(piece, owner))
        if self.residuals is None:
            encode_part(self._codec, part, seed=seed, out=out, counts=counts)
        else:
            self.residuals.encode(self._layout.number(piece, owner), part, seed=seed, out=out, counts=counts)

    def _rows(self, piece: int) -> tuple[slice, Rows]:
        """The elements from the first one of a piece on, and where its part of each chunk is in these."""
        layout = self._layout
        begin = min(piece * layout.piece, layout.n)
        return slice(begin, layout.n), Rows(layout.n - begin, layout.chunk, layout.width(piece), layout.owners)


class Scatter(Pass):
    """First pass: each rank encodes all chunks of its vector and sends each to its owner, piece by piece.

    The exact part's chunks travel with the first piece: so many bytes behind each payload.
    """

    def _prepare(self, communicator: Communicator, extra: int) -> list[Slots]:
        rows = with_extra(self._slots, extra)
        self._sent, self._received = (Slots(communicator.size, rows) for _ in range(2))
        self._works: list[Work] = [FINISHED, FINISHED]
        return [self._sent, self._received]

    def _encoded(self) -> Sequence[int]:
        return range(self._layout.owners)

    def start(
        self, piece: int, x: torch.Tensor, seed: int, source: Source | None = None, exact: torch.Tensor | None = None
    ) -> None:
        """Encodes one piece of each chunk of `x`, of shape (n,), or of what `source` gives, and starts sending it."""
        layout, sent = self._layout, self._sent[piece]
        rank, owners = self._communicator.rank, range(layout.owners)
        for owner, size in self._pads[piece]:
            sent[owner, size : self._slots[piece]].zero_()

        def own(owner: int) -> int:
            return first_seed(self._codec, seed, rank, layout.number(piece, owner))

        if source is None and self.residuals is None and self._in_rows and layout.n:
            assert isinstance(self._codec, BlockCodec)
            behind, rows = self._rows(piece)
            to = sent[:, : self._slots[piece]]
            seeds = list(map(own, owners)) if self._codec.stochastic else []
            self._codec.encode_rows(x[behind], to, rows, seeds=seeds, counts=self._counts.of(behind))
        else:
            full = 0
            if source is not None and self._in_rows:
                assert isinstance(self._codec, BlockCodec)
                full = self._rows(piece)[1].full
                seeds = list(map(own, range(full))) if self._codec.stochastic else [0] * full
                if full:
                    pieces = [source(layout.part(piece, owner)) for owner in range(full)]
                    self._codec.encode_rows_of_pieces(pieces, sent[:full, : self._slots[piece]], seeds=seeds)
            for owner in owners[full:]:
                part, out = layout.part(piece, owner), sent[owner, : self._bytes[piece, owner]]
                if source is None:
                    self._encode(piece, owner, x[part], own(owner), out)
                elif length(part) and isinstance(self._codec, BlockCodec):
                    self._codec.encode_pieces(source(part), seed=own(owner), out=out)
        if piece == 0 and self._exact is not None and exact is not None:
            self._exact.scatter(exact, sent[:, self._slots[0] :])
        received = self._received[piece]
        self._works[piece % 2] = self._communicator.all_to_all(received.view(-1), sent.view(-1))

    def finish(self, piece: int, exact_mean: torch.Tensor | None = None) -> Generator[Work, None, torch.Tensor]:
        """Waits for that piece of this rank's chunk, and returns everyone's payload of it, shape (ranks, bytes).

        With the first piece `exact_mean`, of as many bytes as the exact part adds to a row, gets the mean of this rank's chunk.
        """
        yield self._works[piece % 2]
        received, size = self._received[piece], self._bytes[piece, self._communicator.rank]
        if piece == 0 and self._exact is not None and exact_mean is not None:
            self._exact.reduce(received[:, self._slots[0] :], exact_mean)
        payloads = received[:, :size]
        return payloads if isinstance(self._codec, BlockCodec) else payloads.contiguous()


class Gather(Pass):
    """Second pass: each rank encodes its chunk and sends that to everyone, piece by piece; all decode the same bytes.

    The means of the exact part's chunks travel with the first piece, as in `Scatter`.

    Attributes:
        mean: room for the mean of a piece, which `start_reduced` needs beside `slots`.
    """

    def _prepare(self, communicator: Communicator, extra: int) -> list[Slots]:
        self._messages = Messages(communicator, self._slots, extra)
        # With a residual the mean is needed as numbers before it is encoded.
        self.mean = Slots(1, [4 * self._layout.piece] if self.residuals is not None else [])
        return self._messages.slots

    def _encoded(self) -> Sequence[int]:
        return (self._communicator.rank,)

    @property
    def exact_mean(self) -> torch.Tensor:
        """Where the mean of this rank's chunk of the exact part is to be written before the first piece starts."""
        return self._messages.own_extra

    def start_reduced(self, piece: int, payloads: torch.Tensor, seed: int) -> None:
        """Encodes the mean of everyone's payloads, of shape (ranks, bytes), of a piece of this rank's chunk, and sends it."""
        rank, scale = self._communicator.rank, 1.0 / self._communicator.size
        elements, (own, out) = length(self._layout.part(piece, rank)), self._target(piece, seed)
        if elements and self.residuals is not None:
            mean = self._codec.decode_sum(payloads, self.mean[0][0].view(torch.float32)[:elements], scale)
            self._encode(piece, rank, mean, own, out)
        elif elements and isinstance(self._codec, BlockCodec):
            counts = self._counts.of(self._layout.part(piece, rank))
            self._codec.reduce(payloads, elements, scale=scale, seed=own, out=out, counts=counts)
        elif elements:
            self._codec.reduce(payloads, elements, scale=scale, seed=own, out=out)
        self._messages.start(piece)

    def start(self, piece: int, shard: torch.Tensor, seed: int) -> None:
        """Encodes a piece of this rank's chunk, which is `shard`, and starts sending it."""
        rank, begin = self._communicator.rank, piece * self._layout.piece
        own, out = self._target(piece, seed)
        self._encode(piece, rank, shard[begin : begin + length(self._layout.part(piece, rank))], own, out)
        self._messages.start(piece)

    def _target(self, piece: int, seed: int) -> tuple[int, torch.Tensor]:
        """The seed of a piece of this rank's chunk, and where its payload is to be written."""
        rank = self._communicator.rank
        own, row = second_seed(self._codec, seed, self._layout.number(piece, rank)), self._messages.own(piece)
        row[self._bytes[piece, rank] :].zero_()
        return own, row[: self._bytes[piece, rank]]

    def finish(
        self, piece: int, x: torch.Tensor, exact: torch.Tensor | None = None, deliver: Deliver | None = None
    ) -> Steps:
        """Waits for a piece of all chunks, and decodes it into its place in `x`, of shape (n,); `exact` gets its mean.

        With `deliver` that takes each part and its payload instead of `x`.
        """
        payloads = yield from self._messages.finish(piece)
        if piece == 0 and self._exact is not None and exact is not None:
            self._exact.gather(self._messages.extras, exact)
        if deliver is None and self._in_rows and self._layout.n:
            assert isinstance(self._codec, BlockCodec)
            behind, rows = self._rows(piece)
            self._codec.decode_rows(payloads, x[behind], rows)
            return
        for owner in range(self._layout.owners):
            part, payload = self._layout.part(piece, owner), payloads[owner, : self._bytes[piece, owner]]
            if not length(part):
                continue
            if deliver is None:
                self._codec.decode(payload, x[part])
            else:
                deliver(part, payload)


class Messages:
    """All-gathers of one row of bytes per rank; the first rows may have more bytes at their end.

    Args:
        communicator: the ranks.
        sizes: for each piece, the bytes of a row.
        extra: bytes behind the first row, a multiple of 16.
    """

    def __init__(self, communicator: Communicator, sizes: Sequence[int], extra: int) -> None:
        self._communicator = communicator
        self._sizes = sizes
        rows = with_extra(sizes, extra)
        self._own, self._all = Slots(1, rows), Slots(communicator.size, rows)
        self._works: list[Work] = [FINISHED, FINISHED]

    @property
    def slots(self) -> list[Slots]:
        """What needs memory while a vector is under way (`lent`)."""
        return [self._own, self._all]

    def own(self, piece: int) -> torch.Tensor:
        """Where this rank's row of a piece is to be written, shape (bytes,)."""
        return self._own[piece][0, : self._sizes[piece]]

    @property
    def own_extra(self) -> torch.Tensor:
        """Where what goes behind this rank's first row is to be written, shape (extra,)."""
        return self._own[0][0, self._sizes[0] :]

    @property
    def extras(self) -> torch.Tensor:
        """What came behind everyone's first row, shape (ranks, extra); from when that is finished to the start of the third."""
        return self._all[0][:, self._sizes[0] :]

    def start(self, piece: int) -> None:
        """Starts sending this rank's row."""
        own = self._own[piece]
        self._works[piece % 2] = self._communicator.all_gather(self._all[piece].view(-1), own.view(-1))

    def finish(self, piece: int) -> Generator[Work, None, torch.Tensor]:
        """Waits for everyone's rows, shape (ranks, bytes)."""
        yield self._works[piece % 2]
        return self._all[piece][:, : self._sizes[piece]]


def with_extra(sizes: Sequence[int], extra: int) -> list[int]:
    """The bytes of each piece's row, of which the first carries so many more."""
    return [size + (extra if piece == 0 else 0) for piece, size in enumerate(sizes)]
