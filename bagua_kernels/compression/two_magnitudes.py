"""Signs with two magnitudes per block: two bits per element."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, register
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.signs import two_magnitudes


@dataclass(frozen=True)
class TwoMagnitudes(BlockCodec):
    """Two bits per element: its sign, and which of two magnitudes of its block is nearer.

    1. t = the mean of |v| over the block.
    2. Five times: a, b = the means of |v| up to t and above t; t = (a + b) / 2. These are steps of Lloyd's algorithm ("Least
       Squares Quantization in PCM", 1982).
    3. Sent are a and b as bfloat16, and for each v its sign and 1 if |v| > (a + b) / 2. Decoded are -a, a, -b and b.

    A block of equal magnitudes is exact to bfloat16. Scaling by a power of two scales the output. Relative errors are 0.34
    (Gauss), 0.41 (Laplace) and 0.45 (Student, 4 degrees of freedom), where those of `Sign` are 0.60 to 0.71. Zero counts as
    positive on every rank, and decodes to a: an element that is always zero needs a mask or error feedback.

    Attributes:
        block: elements per block, a power of two from 32 to 4096; 0.27 bytes per element at 256.
    """

    block: int = 256

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return two_magnitudes(self.block)

    @property
    def bias(self) -> Contractive:
        """For magnitudes above 2^-126, below which bfloat16 loses digits.

        What is kept is at least what the first two sides keep, above and up to the mean m. Let k of B elements be above it, and
        their sum k m + d m. In exact arithmetic B m^2 + (d m)^2 B / (k (B - k)) is then kept. The square norm is greatest if one
        element has all of d: at most (d^2 + d + B) m^2. The quotient is least for d = B - k and k close to B / 3. It is 6.03 / B
        at B = 32, and more for larger blocks. Rounding takes less than the rest.
        """
        return Contractive(6.0 / self.block)


register("two_magnitudes", TwoMagnitudes)
