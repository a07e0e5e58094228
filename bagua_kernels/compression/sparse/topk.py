"""Exact top-k: the elements of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bagua_kernels.compression.codec import Codec, Contractive, register
from bagua_kernels.compression.sparse.codec import delta_of, value_codec
from bagua_kernels.compression.sparse.form import kept
from bagua_kernels.compression.sparse.largest import Largest


@dataclass(frozen=True)
class TopK(Largest):
    """The k elements of largest magnitude, k = min(n, max(1, floor(ratio n))); of equal ones those of lowest index.

    Sparsified SGD with memory (Stich, Cordonnier, Jaggi, NeurIPS 2018). The result is exact; a sample only finds elements
    that need not be read twice. See `docs/wire-format-sparse.md`.

    Attributes:
        ratio: kept part of the elements, above 0 and at most 1.
        values: codec of the kept values, as such or as text for `from_spec`; None keeps them in float32. It must be
            contractive.
    """

    ratio: float = 0.01
    values: Codec | str | None = None

    sample = 0.01
    aim = Fraction(115, 100)

    @property
    def bias(self) -> Contractive:
        """Keeps k of n elements, no smaller than the rest, so |C(v) - v|^2 <= (1 - k/n) |v|^2.

        For any n, k/n >= ratio / 2: floor(y) > y / 2 if y = ratio n >= 1. If y < 1, one element of fewer than 1 / ratio is
        kept. All are kept at a ratio of 1. A codec of the values that keeps the part delta' of their norm
        keeps delta' k/n of the whole.
        """
        exact = 1.0 if self.ratio == 1 else self.ratio / 2
        return Contractive(exact * delta_of(value_codec(self.values)))

    def _kept(self, n: int) -> tuple[int, int, int]:
        k = kept(self.ratio, n)
        return k, k, k


register("topk", TopK)
