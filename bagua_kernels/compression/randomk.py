"""Random-k: elements that the seed chooses, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bagua_kernels.compression.cast import Elements
from bagua_kernels.compression.codec import Codec, Contractive, Unbiased, check_switches, register
from bagua_kernels.compression.sparse import (
    Layout,
    SparseCodec,
    check_residual,
    checked_fraction,
    delta_of,
    kept,
    value_codec,
)
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector, checked_seed
from bagua_kernels.launchers.select import permuted

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RandomK(SparseCodec):
    """k = min(n, max(1, floor(ratio n))) elements without replacement, chosen by the seed alone.

    Sparsified SGD with memory (Stich, Cordonnier, Jaggi, NeurIPS 2018); scaled by n/k, gradient sparsification with equal
    probabilities (Wangni et al., NeurIPS 2018). All ranks should use one seed: their payloads then hold the same elements,
    and may be summed by the network; `reduce` with that seed loses nothing but rounding, though it scales unbiased values once
    more. See `docs/wire-format-sparse.md`.

    Attributes:
        ratio: kept part of the elements, above 0 and at most 1.
        unbiased: scale the values by n/k.
        values: codec of the kept values, as such or as text for `from_spec`; None keeps them in float32. It must be
            contractive, and exact if `unbiased`.
    """

    ratio: float = 0.01
    unbiased: bool = False
    values: Codec | str | None = None

    block = 1
    stochastic = True
    shared_seed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_fraction("ratio", self.ratio))
        object.__setattr__(self, "values", value_codec(self.values))
        check_switches(self)
        if self.unbiased and delta_of(self._codec) < 1:
            raise ValueError(f"unbiased=True needs values that are kept exactly, got values={self.values!r}")

    @property
    def _codec(self) -> Codec:
        return value_codec(self.values)

    @property
    def bias(self) -> Unbiased | Contractive:
        """Over the seeds each element is kept with probability k/n >= ratio / 2, see `TopK`.

        So E |C(v) - v|^2 = (1 - k/n) |v|^2, or, scaled by n/k, (n/k - 1) |v|^2.
        """
        part = 1.0 if self.ratio == 1 else self.ratio / 2
        return Unbiased(1 / part - 1) if self.unbiased else Contractive(part * delta_of(self._codec))

    @property
    def linear(self) -> bool:
        """Whether the numbers that `summable` shows are the values themselves."""
        return isinstance(self._codec, Elements)

    def summable(self, payload: torch.Tensor) -> torch.Tensor:
        """A view of the values, float32 or a 16-bit float, that ranks with one seed may sum in place.

        Raises:
            ValueError: the values are not stored as numbers, or the payload has no header.
        """
        if not isinstance(self._codec, Elements):
            raise ValueError(f"payloads with values={self.values!r} cannot be summed; use decode_sum")
        if payload.numel() == 0:
            return payload.view(self._codec.stored)
        if payload.numel() < 16:
            raise ValueError(f"a payload begins with a header of 16 bytes, got {payload.numel()} bytes")
        return self._codec.summable(payload[16:])

    def _layout(self, n: int) -> Layout:
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        k = kept(self.ratio, n)
        return Layout(n, k, False, self._codec.payload_size(k))

    @torch.no_grad()
    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector of shape (n,), float32, float16 or bfloat16; see `Codec.encode`.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device, alignment or the seed does not fit.
            BackendUnavailableError: no kernel backend serves the device.
        """
        check_vector("x", x, FLOAT_DTYPES)
        return self._encode(x, seed, out)[0]

    @torch.no_grad()
    def encode_feedback(
        self, x: torch.Tensor, residual: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes a = x + residual, and makes what the payload lacks of it the new residual, 0 where that is not finite.

        Args:
            x: shape (n,), float32, float16 or bfloat16.
            residual: shape (n,), float32; a - C(a) afterwards.
            seed: as in `encode`.
            out: as in `encode`.

        Returns:
            The payload. Errors as in `encode`.
        """
        check_residual(residual, x)
        layout = self._layout(x.numel())
        if out is not None:
            check_bytes("out", out, (layout.size,), x.device, f"n={layout.n}")
        checked_seed(seed)
        out, positions = self._encode(residual.add_(x), seed, out)
        if layout.n:
            decoded = self._codec.decode(out[16:], residual.new_empty(layout.capacity))
            lost = residual.index_select(0, positions).sub_(decoded)
            residual.index_copy_(0, positions, lost)
            residual.masked_fill_(~residual.isfinite(), 0)
        return out

    def _encode(self, x: torch.Tensor, seed: int, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self._layout(x.numel())
        if out is None:
            out = torch.empty(layout.size, dtype=torch.uint8, device=x.device)
        check_bytes("out", out, (layout.size,), x.device, f"n={layout.n}")
        positions = permuted(layout.n, layout.capacity, seed, x.device)
        if layout.n:
            header, _, _, encoded = layout.parts(out)
            header[0] = layout.capacity
            header[1] = seed - (1 << 64) if seed >> 63 else seed
            values = x.index_select(0, positions).float()
            if self.unbiased:
                values = values * float(np.float32(layout.n / layout.capacity))
            self._codec.encode(values, seed=seed, out=encoded)
        return out, positions

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,), zeros where nothing was kept.

        The positions follow from the seed in the payload, for which the call waits on a GPU.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit, or the payload is damaged.
        """
        check_vector("out", out, FLOAT_DTYPES)
        layout = self._layout(out.numel())
        check_bytes("payload", payload, (layout.size,), out.device, f"n={layout.n}")
        if layout.n:
            positions, values = self._entries(payload, layout, out.dtype)
            out.zero_().index_copy_(0, positions, values)
        return out

    @torch.no_grad()
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of all decoded payloads, of shape (ranks, payload_size(n)), to `out`, of shape (n,).

        Sums are taken in float32, in the order of the ranks, and rounded to the dtype of `out` at the end. Errors as in
        `decode`.
        """
        check_vector("out", out, FLOAT_DTYPES)
        layout = self._layout(out.numel())
        check_bytes("payloads", payloads, (-1, layout.size), out.device, f"n={layout.n}")
        if layout.n == 0:
            return out
        total = out.zero_() if out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
        for payload in payloads:
            positions, values = self._entries(payload, layout, torch.float32)
            total.index_copy_(0, positions, total.index_select(0, positions).add_(values))
        total.mul_(scale)
        return out if total is out else out.copy_(total)

    def _entries(self, payload: torch.Tensor, layout: Layout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        header, _, _, encoded = layout.parts(payload)
        count, seed = header.tolist()
        if count != layout.capacity:
            raise ValueError(f"the payload is damaged: its header counts {count} entries, expected {layout.capacity}")
        positions = permuted(layout.n, layout.capacity, seed & MASK, payload.device)
        values = torch.empty(layout.capacity, dtype=dtype, device=payload.device)
        return positions, self._codec.decode(encoded, values)


register("randomk", RandomK)
