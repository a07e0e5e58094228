"""Keeps the largest elements of each chunk, with two magnitudes, and puts them back.

`docs/wire-format-sparse.md`, "ChunkedTopK", fixes the bytes. Arguments are checked here, once for all backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import padded

OP = Op(__name__)
INFINITE = 0x7F800000


@dataclass(frozen=True)
class Record:
    """Where the parts of a chunk's record lie, in words of 32 bits.

    Attributes:
        k: entries of a whole chunk.
        chunk: elements of a whole chunk.
    """

    k: int
    chunk: int

    @property
    def low_bits(self) -> int:
        """Bits of an index that are stored as they are."""
        return (self.chunk // self.k).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Bits of the vector that has the rest of the indices."""
        return self.k + (self.chunk >> self.low_bits)

    @property
    def starts(self) -> tuple[int, int, int]:
        """Where the high part, the codes and the magnitudes begin."""
        high = -(-self.k * self.low_bits // 32)
        codes = high + -(-self.high_bits // 32)
        return high, codes, codes + -(-2 * self.k // 32)

    @property
    def words(self) -> int:
        """Length of a record."""
        return self.starts[2] + 1

    def chunks(self, n: int) -> int:
        """Number of chunks of `n` elements."""
        return -(-n // self.chunk)

    def size(self, n: int) -> int:
        """Bytes of the payload of `n` elements."""
        return padded(4 * self.words * self.chunks(n))

    def kept_in_last(self, n: int) -> int:
        """Number of entries of the last chunk of `n` elements."""
        rest = n - (self.chunks(n) - 1) * self.chunk
        return max(1, (2 * self.k * rest + self.chunk) // (2 * self.chunk))

    def of(self, payloads: torch.Tensor, n: int) -> torch.Tensor:
        """Views the records of payloads as int32, of shape (ranks, chunks, words)."""
        whole = payloads[..., : 4 * self.words * self.chunks(n)].view(torch.int32)
        records: torch.Tensor = whole.unflatten(-1, (self.chunks(n), self.words))
        return records


def encode(
    x: torch.Tensor,
    records: torch.Tensor,
    record: Record,
    residual: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    beta: float = 1.0,
) -> None:
    """Encodes a vector v, and leaves in `residual` what the records lack of it.

    v is x; with a residual beta residual + x; with `start` too beta residual + (start - x).

    Args:
        x: shape (n,), n >= 1, float32, float16 or bfloat16.
        records: shape (chunks, words), int32, overwritten.
        record: the form.
        residual: shape (n,), float32; updated. 0 afterwards where v is not finite.
        start: shape (n,), float32; rounded to the dtype of `x` before the difference is taken. Only with a residual.
        beta: factor of the residual.
    """
    OP.backend(x.device).encode(x, records, record, residual, start, beta)


def decode_sum(
    records: torch.Tensor, out: torch.Tensor, record: Record, scale: float = 1.0, contributors: bool = False
) -> bool:
    """Decodes vectors and adds them up in float32, in the order of the ranks, to zeros.

    Args:
        records: shape (ranks, chunks, words), int32; ranks may lie apart.
        out: shape (n,), n >= 1, float32; overwritten.
        record: the form.
        scale: factor of the sum.
        contributors: True if each element is divided by the number of ranks that have an entry for it, instead of scaled.

    Returns:
        False if a record is damaged; `out` is unspecified then, and nothing outside it was touched.
    """
    flags = torch.zeros(1, dtype=torch.int32, device=out.device)
    OP.backend(out.device).decode_sum(records, out, record, scale, contributors, flags)
    # waits: a damaged record raises before its values are used.
    return not int(flags)


def add_in_turn(
    add: Callable[..., None],
    records: torch.Tensor,
    out: torch.Tensor,
    record: Record,
    scale: float,
    contributors: bool,
    flags: torch.Tensor,
) -> None:
    """How a backend whose kernel adds the records of one rank at a time does `decode_sum`."""
    out.zero_()
    senders = torch.zeros_like(out, dtype=torch.int32) if contributors else None
    for row in records:
        add(row, out, record, senders, flags)
    if senders is None:
        out.mul_(scale)
    else:
        out.div_(senders.clamp_(min=1))
