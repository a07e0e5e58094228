"""Where the parts of a sparse payload lie, and how many elements it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from bagua_kernels.launchers.arguments import padded
from bagua_kernels.launchers.select import CHUNK

HEADER = 16


def kept(ratio: float, n: int) -> int:
    """min(n, max(1, floor(ratio n))), of the ratio as it is written in decimal: 0.29 of 100 elements are 29."""
    return min(n, max(1, math.floor(Fraction(repr(ratio)) * n)))


def checked_fraction(name: str, value: float) -> float:
    """`value` as a float, if it is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
    return float(value)


@dataclass(frozen=True)
class SparseForm:
    """Where the parts of a payload lie.

    Attributes:
        n: number of elements.
        capacity: number of entries that there is room for.
        indexed: True if the positions are in the payload.
        value_bytes: bytes of the encoded values.
    """

    n: int
    capacity: int
    indexed: bool
    value_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks of 65,536 elements."""
        return -(-self.n // CHUNK)

    @property
    def index_bytes(self) -> tuple[int, int]:
        """Bytes of the ends and of the offsets."""
        return (padded(4 * self.chunks), padded(2 * self.capacity)) if self.indexed else (0, 0)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return HEADER + sum(self.index_bytes) + self.value_bytes if self.n else 0

    def parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the header, the ends and the offsets (as int64, int32, int16) and of the values' bytes, with pads.

        The payload may have rows, and the views have them then, too.
        """
        header, ends, offsets, values = payload.split([HEADER, *self.index_bytes, self.value_bytes], dim=-1)
        return header.view(torch.int64), ends.view(torch.int32), offsets.view(torch.int16), values
