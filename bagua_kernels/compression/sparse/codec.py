"""What all codecs of some of the elements share, however these are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from bagua_kernels.compression.cast import Identity
from bagua_kernels.compression.codec import Codec, Contractive, Unbiased, check_codec, from_spec
from bagua_kernels.compression.sparse.form import SparseForm, checked_fraction
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector


class SparseCodec(ABC):
    """What codecs of some of the elements share, however these are chosen."""

    ratio: float
    values: Any

    def __post_init__(self) -> None:
        check_codec(self)
        object.__setattr__(self, "ratio", checked_fraction("ratio", self.ratio))
        object.__setattr__(self, "values", value_codec(self.values))

    @abstractmethod
    def _form(self, n: int) -> SparseForm:
        """The form of a payload of `n` elements, whose number is checked."""

    @abstractmethod
    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Codec.encode`."""

    @abstractmethod
    def _add_up(self, payloads: torch.Tensor, form: SparseForm, total: torch.Tensor, scale: float) -> None:
        """Writes `scale` times the sum of all decoded payloads, of one element or more, to `total`, float32."""

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        return self._form(n).size

    @torch.no_grad()
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of all decoded payloads, of shape (ranks, payload_size(n)), to `out`, of shape (n,).

        Sums are taken in float32, in the order of the ranks, and rounded to the dtype of `out` at the end. Errors as in
        `decode`.
        """
        check_vector("out", out, FLOAT_DTYPES)
        form = self._form(out.numel())
        check_bytes("payloads", payloads, (-1, form.size), out.device, f"n={form.n}")
        if form.n == 0:
            return out
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._add_up(payloads, form, total, scale)
        return out if total is out else out.copy_(total)

    @torch.no_grad()
    def reduce(
        self, payloads: torch.Tensor, n: int, *, scale: float = 1.0, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of all decoded payloads; errors as in `encode` and `decode`.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8.
            n: number of elements.
            scale: factor of the sum.
            seed: as in `encode`.
            out: shape (payload_size(n),), uint8; made if None.
        """
        self._form(n)
        total = torch.empty(n, dtype=torch.float32, device=payloads.device)
        return self.encode(self.decode_sum(payloads, total, scale), seed=seed, out=out)

    def _payload(self, x: torch.Tensor, out: torch.Tensor | None) -> tuple[SparseForm, torch.Tensor]:
        """The form of the payload of a vector, and the memory for it: `out`, checked, or new memory."""
        form = self._form(x.numel())
        if out is None:
            out = torch.empty(form.size, dtype=torch.uint8, device=x.device)
        check_bytes("out", out, (form.size,), x.device, f"n={form.n}")
        return form, out


def value_codec(values: Codec | str | None) -> Codec:
    """The codec of the kept values: the one given, the one a spec describes, or float32 as it is.

    Raises:
        ValueError: it is unbiased, so that what is kept would be exact on average and what is dropped would not.
    """
    codec = from_spec(values) if isinstance(values, str) else Identity() if values is None else values
    if not isinstance(codec, Codec):
        raise ValueError(f"values must be a codec, the spec of one, or None, got {values!r}")
    if isinstance(codec.bias, Unbiased):
        raise ValueError(
            f"the values need a contractive codec, got the unbiased {codec!r}: its error has no bound below 1 that error "
            "feedback could rely on; round to nearest instead"
        )
    return codec


def delta_of(codec: Codec) -> float:
    """The part of the norm that a contractive codec keeps."""
    assert isinstance(codec.bias, Contractive)
    return codec.bias.delta


def check_beside(name: str, vector: torch.Tensor, x: torch.Tensor) -> None:
    """Raises unless a vector, such as a residual, is contiguous, float32 and as long as `x`, on the same device."""
    check_vector("x", x, FLOAT_DTYPES)
    check_vector(name, vector, (torch.float32,))
    if vector.shape != x.shape or vector.device != x.device:
        raise ValueError(
            f"{name} must have shape {tuple(x.shape)} on {x.device}, got {tuple(vector.shape)} on {vector.device}"
        )
