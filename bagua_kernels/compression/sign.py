"""Signs: one bit an element, with a block's mean magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Contractive, register
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.signs import SIGN, SIGN_TWO_MEANS


@dataclass(frozen=True)
class Sign(BlockCodec):
    """One bit an element: its sign, times the mean magnitude of its block (EF-signSGD: Karimireddy et al., ICML 2019).

    With two means, that of the negative values and that of the others: 1-bit SGD (Seide et al., Interspeech 2014), with
    blocks instead of columns. Zero counts as positive, on every rank alike; it cannot be represented, so an element that
    always is zero needs a mask or error feedback.

    Attributes:
        block: elements a block, a power of two from 32 to 4096; 0.14 bytes an element at 256.
        two_means: keep a mean for either side.
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
