"""Random-k: elements that the seed chooses, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bagua_kernels.compression.cast import Elements
from bagua_kernels.compression.codec import Codec, Contractive, Unbiased, check_codec, register
from bagua_kernels.compression.sparse.codec import SparseCodec, check_beside, delta_of, value_codec
from bagua_kernels.compression.sparse.form import SparseForm, kept
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector, checked_seed
from bagua_kernels.launchers.select import permuted

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RandomK(SparseCodec):
    """k = min(n, max(1, floor(ratio n))) elements without replacement, chosen by the seed alone.

    Sparsified SGD with memory (Stich, Cordonnier, Jaggi, NeurIPS 2018); scaled by n/k, gradient sparsification with equal
    probabilities (Wangni et al., NeurIPS 2018). All ranks should use one seed. Their payloads then hold the same elements,
    and the network may add them. `reduce` with that seed loses only rounding, but it scales unbiased values once more. See
    `docs/wire-format-sparse.md`.

    A vector with inf or NaN at any place, drawn or not, decodes to NaN throughout, so that ranks see it whatever the seed draws.

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
        super().__post_init__()
        check_codec(self)
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
        """True if the numbers of `summable` are the values themselves."""
        return isinstance(self._codec, Elements)

    def summable(self, payload: torch.Tensor) -> torch.Tensor:
        """A view of the values, float32 or a 16-bit float, that ranks with one seed may sum in place.

        Raises:
            ValueError: the values are not stored as numbers, or the payload has no header.
        """
        if not isinstance(self._codec, Elements):
            raise ValueError(f"payloads with values={self.values!r} cannot be summed; use decode_sum")
        if 0 < payload.numel() < 16:
            raise ValueError(f"a payload begins with a header of 16 bytes, got {payload.numel()} bytes")
        return self._codec.summable(payload[16:])

    def _form(self, n: int) -> SparseForm:
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        k = kept(self.ratio, n)
        return SparseForm(n, k, False, self._codec.payload_size(k))

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
        """Encodes a = x + residual, and makes what the payload lacks of it the new residual.

        Where that is not finite the residual stays as it was, as all of it does if an element of a is not finite.

        Args:
            x: shape (n,), float32, float16 or bfloat16.
            residual: shape (n,), float32; a - C(a) afterwards. What was not finite before is 0 afterwards.
            seed: as in `encode`.
            out: as in `encode`.

        Returns:
            The payload. Errors as in `encode`.
        """
        check_beside("residual", residual, x)
        form = self._form(x.numel())
        if out is not None:
            check_bytes("out", out, (form.size,), x.device, f"n={form.n}")
        checked_seed(seed)
        total = residual + x
        out, positions, finite = self._encode(total, seed, out)
        if form.n:
            decoded = self._codec.decode(out[16:], residual.new_empty(form.capacity))
            lacking = total.index_select(0, positions).sub_(decoded)
            # A codec of values may have made infinities of great ones.
            total.index_copy_(0, positions, lacking.where(lacking.isfinite(), residual.index_select(0, positions)))
            _take(residual, total, finite)
        return out

    def _encode(
        self, x: torch.Tensor, seed: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The payload, the positions that were drawn, and whether all of `x` is finite, a scalar."""
        form, out = self._payload(x, out)
        positions = permuted(form.n, form.capacity, seed, x.device)
        finite = torch.ones((), dtype=torch.bool, device=x.device)
        if form.n:
            header, _, _, encoded = form.parts(out)
            header[0] = form.capacity
            header[1] = seed - (1 << 64) if seed >> 63 else seed
            values = x.index_select(0, positions).float()
            if self.unbiased:
                values = values * float(np.float32(form.n / form.capacity))
            finite = _all_finite(x)
            values[:1] = values[:1].where(finite, torch.nan)
            self._codec.encode(values, seed=seed, out=encoded)
        return out, positions, finite

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,), zeros where nothing was kept.

        The positions follow from the seed in the payload, for which the call waits on a GPU.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit, or the payload is damaged.
        """
        check_vector("out", out, FLOAT_DTYPES)
        form = self._form(out.numel())
        check_bytes("payload", payload, (form.size,), out.device, f"n={form.n}")
        if form.n:
            positions, values = self._entries(payload, form, out.dtype)
            rest = _rest(values)
            out.copy_(rest.expand_as(out)).index_copy_(0, positions, values.where(rest == 0, rest))
        return out

    def _add_up(self, payloads: torch.Tensor, form: SparseForm, total: torch.Tensor, scale: float) -> None:
        entries = [self._entries(payload, form, torch.float32) for payload in payloads]
        rest = total.new_zeros(())
        for _, values in entries:
            rest = rest + _rest(values)
        total.copy_(rest.expand_as(total))
        for positions, values in entries:
            total.index_copy_(0, positions, total.index_select(0, positions).add_(values))
        total.mul_(scale)

    def _entries(
        self, payload: torch.Tensor, form: SparseForm, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        header, _, _, encoded = form.parts(payload)
        # waits: the seed of a payload chooses the positions, and a damaged header raises.
        count, seed = header.tolist()
        if count != form.capacity:
            raise ValueError(f"the payload is damaged: its header counts {count} entries, expected {form.capacity}")
        positions = permuted(form.n, form.capacity, seed & MASK, payload.device)
        values = torch.empty(form.capacity, dtype=dtype, device=payload.device)
        return positions, self._codec.decode(encoded, values)


def _all_finite(x: torch.Tensor) -> torch.Tensor:
    """Whether all elements are finite, a scalar tensor: one pass without memory in between."""
    low, high = torch.aminmax(x.detach())  # both NaN if an element is
    return torch.isfinite(low) & torch.isfinite(high)


def _rest(values: torch.Tensor) -> torch.Tensor:
    """What the elements decode to that were not drawn, a scalar tensor: 0, or NaN if the first value is."""
    return torch.zeros_like(values[0]).where(~values[0].isnan(), torch.nan)


def _take(residual: torch.Tensor, new: torch.Tensor, finite: torch.Tensor) -> None:
    """Overwrites a residual if all was finite; otherwise it stays, but for what is not finite itself."""
    if residual.is_cuda:
        # Without waiting for what was found.
        torch.where(finite, new, residual.nan_to_num(0.0, 0.0, 0.0), out=residual)
    elif finite:
        residual.copy_(new)
    else:
        residual.nan_to_num_(0.0, 0.0, 0.0)


register("randomk", RandomK)
