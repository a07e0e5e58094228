"""Chunks of one vector, each with a payload of its own in a row of a message: encoded and decoded together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_vector, checked_seed
from bagua_kernels.launchers.blockwise.form import BlockForm, check_counts, check_payload, form_of
from bagua_kernels.rules.quantizers import BlockQuantizer

OP = Op("bagua_kernels.launchers.blockwise")


@dataclass(frozen=True)
class Rows:
    """Where chunks lie in a vector: chunk r begins at element `r * span` and has up to `width` elements.

    Attributes:
        total: elements of the vector; chunks beyond it are short or empty.
        span: elements from the beginning of a chunk to that of the next one, a multiple of the block.
        width: elements of a full chunk, at most `span`.
        count: number of chunks.
    """

    total: int
    span: int
    width: int
    count: int

    @property
    def full(self) -> int:
        """The number of full chunks, which come first; of the others at most one has elements."""
        return min(self.count, max(0, (self.total - self.width) // self.span + 1))

    def part(self, row: int) -> slice:
        """The elements of a chunk."""
        begin = row * self.span
        return slice(min(begin, self.total), min(begin + self.width, self.total))


def encode_rows(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payloads: torch.Tensor,
    rows: Rows,
    *,
    block: int,
    seeds: Sequence[int] | None,
    counts: torch.Tensor | None = None,
) -> None:
    """Encodes each chunk of a vector as `encode` does; on a GPU in one launch.

    Args:
        rule: the quantizer.
        x: shape (`rows.total`,), float32, float16 or bfloat16, contiguous.
        payloads: shape (`rows.count`, size of the payload of a full chunk), uint8; rows may have more behind them. The payload of
            a shorter chunk is at the beginning of its row. The rest of that row stays as it is.
        rows: where the chunks are.
        block: elements of a block.
        seeds: the 64-bit seed of each chunk; None rounds to nearest.
        counts: shape (blocks of `x`,), int32; see `encode`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    check_vector("x", x, FLOAT_DTYPES)
    _check(rule, x, payloads, rows, block)
    check_counts(counts, form_of(rule, x.numel(), block), x.device)
    if seeds is not None:
        for seed in seeds:
            checked_seed(seed)
        if len(seeds) != rows.count:
            raise ValueError(f"expected a seed for each of {rows.count} chunks, got {len(seeds)}")
    if rows.total:
        OP.backend(x.device).encode_rows(rule, x, payloads, rows, block, seeds, counts)


def encode_rows_of_pieces(
    rule: BlockQuantizer,
    pieces: Sequence[Sequence[torch.Tensor]],
    payloads: torch.Tensor,
    *,
    block: int,
    seeds: Sequence[int] | None,
) -> None:
    """Encodes many tensors for each row as `encode_pieces` does; on a CPU in one launch.

    Args:
        rule: the quantizer.
        pieces: for each row contiguous vectors, of one dtype and as many blocks in each row.
        payloads: shape (rows, size of the payload of all blocks of a row), uint8; rows may have more behind them.
        block: elements of a block.
        seeds: the 64-bit seed of each row; None rounds to nearest.

    Raises:
        TypeError: a dtype is not supported, or they differ.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    if seeds is not None and len(seeds) != len(pieces):
        raise ValueError(f"expected a seed for each of {len(pieces)} rows, got {len(seeds)}")
    kinds = set[tuple[torch.dtype, torch.device]]()
    blocks = set[int]()
    for each in pieces:
        for piece in each:
            check_vector("each piece", piece, FLOAT_DTYPES)
            kinds.add((piece.dtype, piece.device))
        blocks.add(sum(-(-piece.numel() // block) for piece in each))
    if len(kinds) != 1 or next(iter(kinds))[1] != payloads.device:
        raise TypeError(f"expected pieces of one dtype on {payloads.device}, got {kinds}")
    if len(blocks) != 1:
        raise ValueError(f"expected as many blocks of {block} elements in each row, got {sorted(blocks)}")
    form = form_of(rule, block * blocks.pop(), block)
    check_payload("payloads", payloads, form, (len(pieces), form.size), payloads.device)
    for seed in seeds or ():
        checked_seed(seed)
    OP.backend(payloads.device).encode_rows_of_pieces(rule, pieces, payloads, form, seeds)


def decode_rows(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, rows: Rows, *, block: int) -> None:
    """Decodes what `encode_rows` gave into `out`, of shape (`rows.total`,); elements between chunks stay as they are."""
    check_vector("out", out, FLOAT_DTYPES)
    _check(rule, out, payloads, rows, block)
    if rows.total:
        OP.backend(out.device).decode_rows(rule, payloads, out, rows, block)


def _check(rule: BlockQuantizer, x: torch.Tensor, payloads: torch.Tensor, rows: Rows, block: int) -> None:
    form = form_of(rule, rows.width, block)
    if x.numel() != rows.total or rows.span % block or not 0 < rows.width <= rows.span:
        raise ValueError(
            f"expected a vector of {rows.total} elements, in chunks of up to {rows.span} elements from multiples of "
            f"{block=}, got {x.numel()} elements and {rows}"
        )
    check_payload("payloads", payloads, form, (rows.count, form.size), x.device)


def encode_in_turn(
    encode: Callable[..., None],
    rule: BlockQuantizer,
    x: torch.Tensor,
    payloads: torch.Tensor,
    rows: Rows,
    block: int,
    seeds: Sequence[int] | None,
    counts: torch.Tensor | None,
    *,
    first: int = 0,
) -> None:
    """How a backend without a kernel for rows does `encode_rows`, from the chunk with the number `first` on."""
    for row, part, form in _chunks(rule, rows, block, first):
        begin = part.start // block
        own = None if counts is None else counts[begin : begin + form.blocks]
        seed = None if seeds is None else seeds[row]
        encode(rule, x[part], payloads[row, : form.size], form, seed, False, own)


def encode_pieces_in_turn(
    encode_pieces: Callable[..., None],
    rule: BlockQuantizer,
    pieces: Sequence[Sequence[torch.Tensor]],
    payloads: torch.Tensor,
    form: BlockForm,
    seeds: Sequence[int] | None,
) -> None:
    """How a backend without a kernel for rows does `encode_rows_of_pieces`."""
    for row, each in enumerate(pieces):
        encode_pieces(rule, each, payloads[row], form, None if seeds is None else seeds[row])


def decode_in_turn(
    decode: Callable[..., None],
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    block: int,
    *,
    first: int = 0,
) -> None:
    """How a backend without a kernel for rows does `decode_rows`, from the chunk with the number `first` on."""
    for row, part, form in _chunks(rule, rows, block, first):
        decode(rule, payloads[row, : form.size], out[part], form)


def _chunks(rule: BlockQuantizer, rows: Rows, block: int, first: int) -> Iterator[tuple[int, slice, BlockForm]]:
    """The number, the elements and the form of each chunk that is not empty, from one on."""
    for row in range(first, rows.count):
        part = rows.part(row)
        form = form_of(rule, part.stop - part.start, block)
        if not form.n:
            return
        yield row, part, form
