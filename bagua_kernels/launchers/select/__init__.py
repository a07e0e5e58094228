"""Selects elements by magnitude and puts them back: collect, write, place, sum, and a keyed permutation of indices.

Entries are ordered by index and grouped by chunks of 65,536 elements, in which 16 bits address an element. Arguments are
checked here, once for all backends; each backend offers the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_vector, checked_seed, seed_halves
from bagua_kernels.rules.random import random_key
from bagua_kernels.upload import uploaded

OP = Op(__name__)
CHUNK = 65_536
ROUNDS = 8
BAD_ENDS = 1
BAD_OFFSETS = 2
_random_key: Callable[..., tuple[Any, Any]] = random_key
# Keys of infinities and NaNs begin here.
INFINITE = 0x7F800000


class Collected:
    """The elements of a vector whose magnitude key is at least a threshold, counted and ready to be written.

    Attributes:
        count: their number.
        ends: shape (chunks,), int64: their number in each chunk and all before.
    """

    def __init__(
        self, x: torch.Tensor, threshold: int, residual: torch.Tensor | None = None, *, expected: int = 0
    ) -> None:
        """Finds the elements in one pass.

        Args:
            x: shape (n,), n >= 1, float32, float16 or bfloat16.
            threshold: the least int32 key, see `bagua_kernels.rules.selection.magnitude_key`.
            residual: shape (n,), float32; if given, `residual + x` takes its place and is searched instead of `x`.
            expected: about how many elements there will be; more cost time.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape or device does not fit.
        """
        check_vector("x", x, FLOAT_DTYPES)
        self._backend = OP.backend(x.device)
        self._state: Any
        counts, self._state = self._backend.collect(x, threshold, residual, expected)
        ends = torch.cumsum(counts, 0)
        self._starts = ends - counts
        self.ends = self._backend.chunk_ends(ends, x.numel())
        # waits: the number of elements that were found decides what comes next.
        self.count = int(ends[-1])

    def write(self, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the entries, in the order of their index.

        Args:
            offsets: shape (count or more,), int16, overwritten: the bits of the uint16 offset in the chunk.
            values: shape (count or more,), float32, overwritten.
        """
        self._backend.write(self._state, self._starts, offsets, values)


def place(ends: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> int:
    """Writes values to their positions in `out`; nothing outside `out` is ever touched.

    Args:
        ends: shape (chunks,), int32: the bits of the uint32 numbers of entries up to the end of each chunk.
        offsets: shape (capacity,), int16: the bits of the uint16 offsets.
        values: shape (capacity,), of the dtype of `out`.
        out: shape (n,).

    Returns:
        0, or what is wrong with the entries: `BAD_ENDS`, `BAD_OFFSETS`, or both.
    """
    flags = torch.zeros(2, dtype=torch.int32, device=out.device)
    bits = torch.int32 if out.dtype == torch.float32 else torch.int16
    OP.backend(out.device).place(ends, offsets, values.view(bits), out.view(bits), flags)
    return _found(flags)


def place_sum(ends: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, out: torch.Tensor, scale: float) -> int:
    """Writes `scale` times the sum of several vectors, of which few elements are given, to `out`; else as `place`.

    Values are added in the order of their rows, to zeros.

    Args:
        ends: shape (rows, chunks), int32; rows may lie apart.
        offsets: shape (rows, capacity), int16; rows may lie apart.
        values: shape (rows, capacity), float32; rows may lie apart.
        out: shape (n,), float32.
        scale: factor of the sum.

    Returns:
        As `place`, of all rows.
    """
    flags = torch.zeros(2, dtype=torch.int32, device=out.device)
    OP.backend(out.device).place_sum(ends, offsets, values, out, scale, flags)
    return _found(flags)


def place_in_turn(
    place: Callable[..., None],
    ends: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    flags: torch.Tensor,
) -> None:
    """How a backend whose kernel adds one row at a time does `place_sum`."""
    out.zero_()
    for row in zip(ends, offsets, values, strict=True):
        place(*row, out, flags, add=True)
    out.mul_(scale)


def _found(flags: torch.Tensor) -> int:
    # waits: a damaged payload raises before its values are used.
    bad_ends, bad_offsets = flags.tolist()
    return (BAD_ENDS if bad_ends else 0) | (BAD_OFFSETS if bad_offsets else 0)


def permuted(n: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """The first `count` indices of a permutation of 0 … n-1 that the seed chooses.

    A Feistel network permutes the least power of four that is not below n. A number outside 0 … n-1 is permuted again
    until it is inside. (Cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.)

    Returns:
        shape (count,), int64, all different.

    Raises:
        ValueError: the seed does not fit in 64 bits.
    """
    bits = half_bits(n)
    keys = uploaded(round_keys(checked_seed(seed) or 0), device)
    positions = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        OP.backend(device).permute(positions, keys, n, bits)
    return positions


def half_bits(n: int) -> int:
    """Bits of half an index: the least h >= 1 with 4^h >= n."""
    return max(1, math.ceil((n - 1).bit_length() / 2))


def round_keys(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Two keys for each round of the Feistel network, int32 bits."""
    low, high = (np.array([half], np.uint32) for half in seed_halves(seed))
    with np.errstate(over="ignore"):
        pairs = [_random_key(low, high, np.array([r], np.uint32)) for r in range(ROUNDS)]
    return np.concatenate([half for pair in pairs for half in pair]).view(np.int32)
