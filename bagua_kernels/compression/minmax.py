"""Min-max quantization: each block is a uniform grid from its least to its greatest value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.compression.codec import Contractive, Unbiased, register
from bagua_kernels.launchers import blockwise
from bagua_kernels.rules.quantizers import MINMAX_UINT8


@dataclass(frozen=True)
class MinMaxUInt8:
    """8 bits an element on a grid of 256 levels from a block's minimum to its maximum (BAGUA, VLDB 2022, section 3.1).

    The grid is anchored at the block's minimum and the levels are clamped, which BAGUA's own formula misses: a block far
    from zero, or of a range below 1e-7, keeps its full precision here. A block of equal values is exact, scaling the input
    scales the output, and a block with an inf or NaN decodes to NaN.

    The payload of n elements has 8 bytes a block and 1 byte an element, see `docs/wire-format.md`.

    Attributes:
        block: elements a block, a power of two from 32 to 4096. Smaller blocks follow the data more closely and cost more:
            1.03 bytes an element at 256, 1.25 at 32.
        stochastic: round up or down at random, so that the error is zero on average, instead of to the nearest level.
    """

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        blockwise.checked_block(self.block)

    @property
    def bias(self) -> Unbiased | Contractive:
        """The bound of the squared error, relative to that of the vector.

        In the worst block two elements are at the ends of the range, which has at least the norm range^2 / 2, and all others
        are zero half-way between two levels, each with an error (or, rounded stochastically, a variance) of step^2 / 4.
        """
        relative = (self.block - 2) / 4 / (255.0**2 / 2)
        return Unbiased(relative) if self.stochastic else Contractive(1.0 - relative)

    @property
    def linear(self) -> bool:
        """False: every payload has scales of its own."""
        return False

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        return blockwise.Layout(n, self.block, MINMAX_UINT8.words).size

    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector.

        Args:
            x: shape (n,), contiguous, float32, float16 or bfloat16, on a CPU or CUDA device.
            seed: of stochastic rounding, 0 to 2**64 - 1; see `fold_seed`. Not used by rounding to nearest.
            out: shape (payload_size(n),), uint8, starting at a multiple of 16 bytes; made if None.

        Returns:
            The payload, shape (payload_size(n),), uint8.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device, alignment or the seed does not fit.
            BackendUnavailableError: no kernel backend serves the device.
        """
        blockwise.check_vector("x", x, blockwise.FLOAT_DTYPES)
        if out is None:
            out = torch.empty(self.payload_size(x.numel()), dtype=torch.uint8, device=x.device)
        blockwise.encode(MINMAX_UINT8, x, out, block=self.block, seed=self._seed(seed))
        return out

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,); errors as in `encode`."""
        blockwise.decode(MINMAX_UINT8, payload, out, block=self.block)
        return out

    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of all decoded payloads to `out`.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8; each is read once.
            out: shape (n,); sums are taken in float32, in the order of the ranks, and rounded to its dtype at the end.
            scale: factor of the sum.

        Returns:
            `out`. Errors as in `encode`.
        """
        blockwise.decode_sum(MINMAX_UINT8, payloads, out, scale=scale, block=self.block)
        return out

    def reduce(
        self, payloads: torch.Tensor, n: int, *, scale: float = 1.0, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of all decoded payloads, without writing anything of float32 size.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8; each is read once.
            n: number of elements.
            scale: factor of the sum.
            seed: of stochastic rounding.
            out: shape (payload_size(n),), uint8; made if None.

        Returns:
            The payload of the result. Errors as in `encode`.
        """
        if out is None:
            out = torch.empty(self.payload_size(n), dtype=torch.uint8, device=payloads.device)
        blockwise.reduce(MINMAX_UINT8, payloads, out, n=n, scale=scale, block=self.block, seed=self._seed(seed))
        return out

    def _seed(self, seed: int) -> int | None:
        return seed if self.stochastic else None


register("minmax_uint8", MinMaxUInt8)
