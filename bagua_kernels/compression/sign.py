"""Signs: one bit per element, with a block's mean magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, register
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.signs import SIGN, SIGN_TWO_MEANS


@dataclass(frozen=True)
class Sign(BlockCodec):
    """One bit per element: its sign, times the mean magnitude of its block (EF-signSGD: Karimireddy et al., ICML 2019).

    Two means, of the negative values and of the others, make it 1-bit SGD (Seide et al., Interspeech 2014), with blocks
    instead of columns. Zero counts as positive on every rank. Zero cannot be represented: an element that is always zero
    needs a mask or error feedback.

    Attributes:
        block: elements per block, a power of two from 32 to 4096; 0.14 bytes per element at 256.
        two_means: True for one mean of the negative values and one of the others.
    """

    block: int = 256
    two_means: bool = False

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return SIGN_TWO_MEANS if self.two_means else SIGN

    @property
    def bias(self) -> Contractive:
        """What is kept of a block is its squared L1 norm over its size; least, 1 / block, if all is in one element."""
        return Contractive(1.0 / self.block)


register("sign", Sign)
