"""A vector's way through two tiers: reduced inside nodes, exchanged between them, and shared inside again."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch

from bagua_kernels.comm.compressed import AllReduce, Deliver, all_reduce_for
from bagua_kernels.comm.compressed.layout import length
from bagua_kernels.comm.hierarchical.payloads import ShardPayloads
from bagua_kernels.comm.hierarchical.scales import Scales
from bagua_kernels.comm.hierarchical.tiers import Tiers
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import FINISHED, Steps, Together, Work
from bagua_kernels.compression import Codec, fold_seed
from bagua_kernels.quotient import divide_

_PIECE = 4 << 20  # bytes of the vector, against which the start of a collective is short
_MOST_PIECES = 8
_ALIGNMENT = 16  # bytes, at whose multiples shards begin


class TieredReduction:
    """Reduces vectors of one size and dtype; `HierarchicalAllReduce` has the steps.

    Making one is not collective, unless the codec's all-reduce is. Arguments are equal on all ranks.

    Attributes:
        plain: True if no codec is applied.
        exchanges: for each piece and shard that this rank owns, the all-reduce of its owners; empty without a codec.
        shares_payloads: True if ranks of a node share the payloads of means, and each decodes them all.
    """

    def __init__(
        self,
        tiers: Tiers,
        n: int,
        dtype: torch.dtype,
        *,
        codec: Codec | None = None,
        op: ReduceOp = ReduceOp.SUM,
        pieces: int | None = None,
        plain_below: int = 0,
        worker_residual: bool = False,
        owner_residual: bool = False,
        own: Sequence[slice] | None = None,
        at_once: bool = False,
    ) -> None:
        """Cuts a vector; arguments as for `HierarchicalAllReduce`, and `own` as for `CompressedAllReduce`.

        With `at_once` step 1 of all pieces starts before the first wait: operations of several threads then start in one order.
        """
        self._at_once = at_once
        self._tiers, self._codec, self._op = tiers, codec, op
        nodes, device = tiers.nodes, tiers.local.device
        self._inner_op = ReduceOp.SUM if op is ReduceOp.AVG else op
        self._scales = Scales.of(nodes, len(tiers.members), dtype, codec, op)
        align = math.lcm(_ALIGNMENT // dtype.itemsize, 1 if codec is None else codec.block)
        self.pieces = nodes.cut(n, align, pieces or min(_MOST_PIECES, n * dtype.itemsize // _PIECE))
        # A shard of each piece, of the length of the piece's first, which is the longest.
        widths = [length(shards[0]) * tiers.scatters for shards in self.pieces]
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._own = [zeros(width) for width in widths]
        # Reduce-scatter needs equal shards. The last piece, where its end falls short, is scattered from a longer copy.
        short = sum(widths) * nodes.largest > n
        self._padded = zeros(widths[-1] * nodes.largest * short)
        # The same on all ranks, though shards differ in length and some hold none.
        lengths = [length(shard) for shards in self.pieces for shard in shards]
        self.plain = codec is None or len(nodes.members) == 1 or max(lengths) < max(1, plain_below)
        self.exchanges: dict[tuple[int, int], AllReduce] = {}
        self.shares_payloads = False
        if codec is None:
            return
        for piece in range(len(self.pieces)):
            for shard in tiers.owners:
                # One for each piece, since each has residuals of its own.
                self.exchanges[piece, shard] = self._exchange_of(
                    codec,
                    self.pieces[piece][shard],
                    shard,
                    dtype=torch.float32 if self._scales.in_float32 else dtype,
                    worker_residual=worker_residual,
                    owner_residual=owner_residual,
                    plain_below=plain_below,
                    own=own,
                )
        # A sum is a multiple of the mean that is encoded, and a short shard is not encoded.
        encoded = not self.plain and self._scales.times == 1 and min(lengths) >= plain_below
        self.shares_payloads = encoded and all(each.delivers for each in self.exchanges.values())
        if self.shares_payloads:
            count = len(nodes.members)
            self._payloads = [[ShardPayloads(codec, length(shard), count) for shard in piece] for piece in self.pieces]
            bytes_ = partial(torch.zeros, dtype=torch.uint8, device=device)
            self._rows = [bytes_(len(piece), max(each.nbytes for each in piece)) for piece in self._payloads]
            self._own_rows = [bytes_(rows.shape[1] * tiers.scatters) for rows in self._rows]

    def _exchange_of(
        self,
        codec: Codec,
        shard: slice,
        number: int,
        *,
        dtype: torch.dtype,
        worker_residual: bool,
        owner_residual: bool,
        plain_below: int,
        own: Sequence[slice] | None,
    ) -> AllReduce:
        """The all-reduce of a shard's owners."""
        inside = None
        if own is not None:
            cut = [(max(span.start, shard.start), min(span.stop, shard.stop)) for span in own]
            inside = [slice(begin - shard.start, end - shard.start) for begin, end in cut if begin < end]
        return all_reduce_for(
            codec,
            self._tiers.owners[number],
            length(shard),
            dtype=dtype,
            worker_residual=worker_residual,
            owner_residual=owner_residual,
            plain_below=plain_below,
            own=inside,
        )

    def steps(self, x: torch.Tensor, seed: int, deliver: Deliver | None = None) -> Steps:
        """Replaces a vector by its reduction over all ranks, or gives payloads of that to `deliver`.

        The communicators are aborted if the generator is closed before its end, or if an error is thrown into it.

        Args:
            x: shape (n,), contiguous.
            seed: of this message, equal on all ranks.
            deliver: called with the payload of each part of the mean, instead of writing to `x`; only with `shares_payloads`.

        Yields:
            The communications, each to be waited for before the generator is resumed.
        """
        try:
            if len(self._tiers.nodes.members) == 1:
                yield self._tiers.local.all_reduce(x, self._op)
            else:
                yield from self._run(x, seed, deliver)
        except BaseException as error:
            # Whatever it is, and be it an interrupt: owners of other shards would wait for this rank until their timeout.
            self._tiers.abort()
            error.add_note(self._tiers.note())
            raise

    def _run(self, x: torch.Tensor, seed: int, deliver: Deliver | None) -> Steps:
        """Steps 1, 2 and 3 of each piece, on all ranks in one order, which is why none waits for ever for another."""
        if self._scales.before != 1:
            divide_(x, self._scales.before)
        # Compressed, step 2 has ended when it returns, and step 3 need not wait for the next piece's.
        lag = 1 if self._codec is None else 0
        count = len(self.pieces)
        reduced, across, shared = list[Work](), list[Work](), list[Work]()
        if self._at_once:
            reduced += [self._reduce_within(x, piece) for piece in range(count)]
        for step in range(count + 1 + lag):
            if step < count and not self._at_once:
                reduced.append(self._reduce_within(x, step))
            if 0 <= step - 1 < count:
                yield reduced[step - 1]
                across.append((yield from self._reduce_across(x, step - 1, seed)))
            if 0 <= step - 1 - lag < count:
                yield across[step - 1 - lag]
                shared.append(self._share_within(x, step - 1 - lag))
        if self.shares_payloads:
            for piece, work in enumerate(shared):
                yield work
                self._decode(x, piece, deliver)
            return
        yield Together(shared)
        if self._padded.numel():
            end = x[_span(self.pieces[-1])]
            end.copy_(self._padded[: end.numel()])

    def reduce_within(self, x: torch.Tensor) -> Generator[Work, None, dict[tuple[int, int], torch.Tensor]]:
        """Returns what the owners of shards exchange, by piece and shard, for a vector that is left as it is."""
        works = [self._reduce_within(x, piece) for piece in range(len(self.pieces))]
        yield Together(works)
        return {
            (piece, shard): mine.clone() if self._scales.weight == 1 else mine * self._scales.weight
            for piece in range(len(self.pieces))
            for shard, mine in self._mine(x, piece)
        }

    def _reduce_within(self, x: torch.Tensor, piece: int) -> Work:
        """Step 1."""
        local = self._tiers.local
        if self._tiers.scatters:
            whole = self._whole(x, piece)
            if whole is self._padded:
                end = x[_span(self.pieces[piece])]
                whole[: end.numel()].copy_(end)
            return local.reduce_scatter(self._own[piece], whole, self._inner_op)
        shards = enumerate(self.pieces[piece])
        return Together([local.reduce(x[shard], s % local.size, self._inner_op) for s, shard in shards])

    def _reduce_across(self, x: torch.Tensor, piece: int, seed: int) -> Generator[Work, None, Work]:
        """Step 2."""
        if self._codec is None:
            owners = self._tiers.owners
            return Together([owners[s].all_reduce(mine, self._inner_op) for s, mine in self._mine(x, piece)])
        for s, mine in self._mine(x, piece):
            yield from self._compress(piece, s, mine, fold_seed(seed, piece, s))
        return FINISHED

    def _share_within(self, x: torch.Tensor, piece: int) -> Work:
        """Step 3."""
        if self._scales.after != 1:
            for _, mine in self._mine(x, piece):
                divide_(mine, self._scales.after)
        shared, shards = self._tiers.shared, self.pieces[piece]
        if self.shares_payloads:
            rows = self._rows[piece]
            if self._tiers.scatters:
                return shared.all_gather(rows.view(-1), self._own_rows[piece])
            return Together(
                [
                    shared.broadcast(rows[s, : each.nbytes], s % shared.size)
                    for s, each in enumerate(self._payloads[piece])
                ]
            )
        if self._tiers.scatters:
            return shared.all_gather(self._whole(x, piece), self._own[piece])
        return Together([shared.broadcast(x[shard], s % shared.size) for s, shard in enumerate(shards)])

    def _decode(self, x: torch.Tensor, piece: int, deliver: Deliver | None) -> None:
        """Decodes the payloads of all shards of a piece, or hands them out."""
        for shard, payloads, row in zip(self.pieces[piece], self._payloads[piece], self._rows[piece], strict=True):
            if deliver is None:
                payloads.decode(row, x[shard])
            else:
                payloads.hand_out(row, shard.start, deliver)

    def _whole(self, x: torch.Tensor, piece: int) -> torch.Tensor:
        """Returns all shards of a piece, of equal lengths."""
        last = piece == len(self.pieces) - 1
        return self._padded if last and self._padded.numel() else x[_span(self.pieces[piece])]

    def _compress(self, piece: int, shard: int, mine: torch.Tensor, seed: int) -> Steps:
        """Replaces a shard by the compressed, weighted mean over its owners, or by their sum."""
        work = mine.float() if self._scales.in_float32 else mine
        if self._scales.weight != 1:
            work.mul_(self._scales.weight)
        exchange = self.exchanges[piece, shard]
        if self.shares_payloads:
            row = self._own_rows[piece] if self._tiers.scatters else self._rows[piece][shard]
            yield from exchange.steps(work, seed=seed, deliver=self._payloads[piece][shard].collect(row))
            return
        yield from exchange.steps(work, seed=seed)
        if self._scales.times != 1:
            work.mul_(self._scales.times)
        if work is not mine:
            mine.copy_(work)

    def _mine(self, x: torch.Tensor, piece: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields number and elements of each shard that this rank owns, those that hold none left out."""
        for s in self._tiers.owners:
            shard = self.pieces[piece][s]
            if elements := length(shard):
                yield s, self._own[piece][:elements] if self._tiers.scatters else x[shard]


def _span(shards: Sequence[slice]) -> slice:
    return slice(shards[0].start, shards[-1].stop)
