"""Natural compression: powers of two."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Unbiased, register
from bagua_kernels.rules.floats import NATURAL
from bagua_kernels.rules.quantizers import BlockQuantizer


@dataclass(frozen=True)
class Natural(BlockCodec):
    """8 bits per element: the sign and one of the two nearest powers of two, drawn without bias.

    Horvath et al., "Natural compression for distributed deep learning", 2019, section 2. The paper's code has 9 bits.
    Here 8 are enough, because a block has a common exponent, with 126 powers of two below it. Smaller values become
    zero or the smallest power, still without bias; values beyond 2^127 become 2^127.

    Attributes:
        block: elements that share the exponent, a power of two from 32 to 4096.
    """

    block: int = 256
    stochastic: bool = field(default=True, init=False, repr=False)

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return NATURAL

    @property
    def bias(self) -> Unbiased:
        """1/8 (the paper's theorem 1), reached at 4/3 of a power of two."""
        return Unbiased(0.125)


register("natural", Natural)
