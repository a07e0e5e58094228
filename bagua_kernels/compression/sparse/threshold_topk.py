"""Top-k by a threshold that is estimated from a sample."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bagua_kernels.compression.codec import Codec, Contractive, register
from bagua_kernels.compression.sparse.codec import delta_of, value_codec
from bagua_kernels.compression.sparse.form import checked_fraction, kept
from bagua_kernels.compression.sparse.largest import Largest


@dataclass(frozen=True)
class ThresholdTopK(Largest):
    """About k = min(n, max(1, floor(ratio n))) elements of largest magnitude: all that reach a threshold, in one pass.

    Deep Gradient Compression (Lin et al., ICLR 2018, section 3 and appendix): the threshold is an order statistic of a
    sample. It is lowered until 0.8 k elements or more are above it. If more than 1.3 k are, the exact k largest of them
    are taken. See `docs/wire-format-sparse.md`.

    Attributes:
        ratio: kept part of the elements, above 0 and at most 1.
        sample: part of the elements in the sample, above 0 and at most 1; the sample is bounded, and short vectors are
            their own.
        values: codec of the kept values, as such or as text for `from_spec`; None keeps them in float32. It must be
            contractive.
    """

    ratio: float = 0.01
    sample: float = 0.01
    values: Codec | str | None = None

    aim = Fraction(105, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sample", checked_fraction("sample", self.sample))

    @property
    def bias(self) -> Contractive:
        """Keeps 0.8 k elements or more, no smaller than the rest; with k/n >= ratio / 2 as for `TopK`, 0.4 ratio."""
        exact = 0.8 if self.ratio == 1 else 0.4 * self.ratio
        return Contractive(exact * delta_of(value_codec(self.values)))

    def _kept(self, n: int) -> tuple[int, int, int]:
        k = kept(self.ratio, n)
        return k, -(-4 * k // 5), min(n, -(-13 * k // 10))


register("threshold_topk", ThresholdTopK)
