"""How a vector is cut, in which order its pieces travel, and which seeds its messages have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from bagua_kernels.comm.work import Steps
from bagua_kernels.compression import Codec, Contractive, fold_seed

FIRST_PASS, SECOND_PASS = 0, 1

_UNIT = 32
# With 8 the first and the last, which overlap with nothing, are an eighth of the message each; more cost more than they hide.
_MOST_PIECES = 8
# Smaller pieces cost more in started kernels and messages than their overlap gains.
_LEAST_ELEMENTS = 1 << 18
_LEAST_BYTES = 1 << 16


@dataclass(frozen=True)
class Layout:
    """A vector cut into one contiguous chunk an owner, and each chunk into pieces, at multiples of whole blocks.

    All chunks but the last ones have the same length, and so have all pieces of a chunk but the last ones. What is beyond
    the vector's end is short or empty. `docs/compressed-collectives.md` gives the formulas.

    Attributes:
        n: elements of the vector.
        owners: number of chunks.
        unit: the alignment of everything, in elements.
        pieces: number of pieces of a chunk, at least one.
    """

    n: int
    owners: int
    unit: int
    pieces: int

    @classmethod
    def cut(cls, codec: Codec, n: int, owners: int, pieces: int | None = None) -> Layout:
        """Cuts a vector for a codec.

        Args:
            codec: its blocks are not cut, and its payloads are to be large enough to be worth a message.
            n: elements of the vector.
            owners: number of chunks.
            pieces: at most so many pieces a chunk; by default up to 8 that have 2**18 elements and 2**16 bytes or more.

        Raises:
            ValueError: the number of elements is negative, or that of the pieces less than one.
        """
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        unit = -(-_UNIT // codec.block) * codec.block
        units = -(-n // (unit * owners))
        if pieces is None:
            chunk = units * unit
            pieces = max(1, min(_MOST_PIECES, chunk // _LEAST_ELEMENTS, codec.payload_size(chunk) // _LEAST_BYTES))
        if pieces < 1:
            raise ValueError(f"the number of pieces must be 1 or more, or None, got {pieces=}")
        # Rounding up to whole units may leave nothing for the last ones.
        piece = -(-units // pieces)
        return cls(n, owners, unit, -(-units // piece) if units else 1)

    @property
    def chunk(self) -> int:
        """Elements of a full chunk."""
        return -(-self.n // (self.unit * self.owners)) * self.unit

    @property
    def piece(self) -> int:
        """Elements of a full piece."""
        return -(-(self.chunk // self.unit) // self.pieces) * self.unit

    def width(self, piece: int) -> int:
        """Elements that piece number `piece` has in a full chunk."""
        return min(self.piece, self.chunk - piece * self.piece)

    def shard(self, owner: int) -> slice:
        """The elements of an owner's chunk."""
        return slice(min(owner * self.chunk, self.n), min((owner + 1) * self.chunk, self.n))

    def part(self, piece: int, owner: int) -> slice:
        """The elements of one piece of an owner's chunk."""
        begin = owner * self.chunk + piece * self.piece
        return slice(min(begin, self.n), min(begin + self.width(piece), self.n))

    def number(self, piece: int, owner: int) -> int:
        """Returns the number that identifies this piece of this chunk in seeds."""
        return piece * self.owners + owner


def length(part: slice) -> int:
    """The number of elements of a part."""
    return int(part.stop - part.start)


def own_counts(own: Iterable[slice], n: int, block: int) -> torch.Tensor:
    """How many elements at the beginning of each block are tensors' own, shape (blocks,), int32.

    Args:
        own: the elements of each tensor in a vector of `n` elements; others only fill blocks up.
        n: elements of the vector.
        block: elements of a block.

    Raises:
        ValueError: a tensor does not begin with a block, ends beyond the vector, or shares a block with another.
    """
    counts = torch.zeros(-(-n // block), dtype=torch.int32)
    for span in own:
        if span.start == span.stop:
            continue
        first, last = span.start // block, -(-span.stop // block)
        if span.start % block or span.stop > n or counts[first:last].any():
            raise ValueError(
                f"tensors in a vector of {n} elements must begin at multiples of {block} and share no block, got {span}"
            )
        counts[first:last] = block
        counts[last - 1] = span.stop - (last - 1) * block
    return counts


def pipeline(pieces: int, *stages: Callable[[int], Steps | None]) -> Steps:
    """Takes all pieces through all stages, so that what one stage starts runs while others compute.

    A stage takes the number of a piece. One that waits for a communication is a generator function that yields it.

    In each round the first stage takes a new piece, the second the one before that, and so on. Each stage but the first begins
    with waiting for what the one before it started a round ago. By then that one has started its next message, so that the wire
    rests only where it is faster than the computation. All ranks have the same order; two buffers for each message suffice.
    """
    for turn in range(pieces + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= turn - behind < pieces and (steps := stage(turn - behind)) is not None:
                yield from steps


def first_seed(codec: Codec, seed: int, rank: int, number: int) -> int:
    """The seed of what a rank encodes of its own vector; without the rank for codecs whose ranks share seeds."""
    if getattr(codec, "shared_seed", False):
        return fold_seed(seed, FIRST_PASS, number)
    return fold_seed(seed, FIRST_PASS, rank, number)


def second_seed(codec: Codec, seed: int, number: int) -> int:
    """The seed of what an owner encodes of a mean.

    A codec whose ranks share seeds keeps the same elements again, so that nothing but rounding is lost. An unbiased one must
    not: it would scale the same elements twice.
    """
    if getattr(codec, "shared_seed", False) and isinstance(codec.bias, Contractive):
        return fold_seed(seed, FIRST_PASS, number)
    return fold_seed(seed, SECOND_PASS, number)
