"""Codecs without arithmetic of their own: the values themselves, in float32 or a 16-bit format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua_kernels.compression.codec import Contractive, register
from bagua_kernels.launchers import arguments
from bagua_kernels.suggestions import did_you_mean


class Elements:
    """Payloads that hold each element in one dtype, padded to 16 bytes. PyTorch converts; nothing is left to gain."""

    block: ClassVar[int] = 1
    linear: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the elements in the payload."""
        raise NotImplementedError

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        return arguments.padded(n * self.stored.itemsize)

    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector of shape (n,), float32, float16 or bfloat16; see `Codec.encode`.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit.
        """
        x = x.detach() if isinstance(x, torch.Tensor) else x
        arguments.check_vector("x", x, arguments.FLOAT_DTYPES)
        n, size = x.numel(), self.payload_size(x.numel())
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        arguments.check_bytes("out", out, (size,), x.device, f"n={n}")
        out[n * self.stored.itemsize :] = 0
        self._elements(out, n).copy_(x)
        return out

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,); errors as in `encode`."""
        arguments.check_vector("out", out, arguments.FLOAT_DTYPES)
        n = out.numel()
        arguments.check_bytes("payload", payload, (self.payload_size(n),), out.device, f"n={n}")
        out.detach().copy_(self._elements(payload, n))
        return out

    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of the payloads, of shape (ranks, size), decoded, to `out`; errors as in `encode`."""
        arguments.check_vector("out", out, arguments.FLOAT_DTYPES)
        n = out.numel()
        arguments.check_bytes("payloads", payloads, (-1, self.payload_size(n)), out.device, f"n={n}")
        total = torch.zeros(n, dtype=torch.float32, device=out.device)
        for payload in payloads:
            total += self._elements(payload, n)
        out.detach().copy_(total.mul_(scale))
        return out

    def reduce(
        self, payloads: torch.Tensor, n: int, *, scale: float = 1.0, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of the payloads, of shape (ranks, size), of `n` elements each, decoded."""
        self.payload_size(n)
        total = torch.empty(n, dtype=torch.float32, device=payloads.device)
        return self.encode(self.decode_sum(payloads, total, scale), out=out)

    def summable(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload as numbers, which the network may add in place; pads are zeros."""
        # A row of no bytes begins at its own number of bytes, which another dtype's elements may not.
        return payload.view(self.stored) if payload.numel() else payload.new_empty(0, dtype=self.stored)

    def _elements(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return self.summable(payload)[:n]


@dataclass(frozen=True)
class Identity(Elements):
    """The float32 of each element: no compression, for comparison and as the values of a sparsifier."""

    @property
    def stored(self) -> torch.dtype:
        """float32."""
        return torch.float32

    @property
    def bias(self) -> Contractive:
        """Exact."""
        return Contractive(1.0)


DTYPES = {"bfloat16": (torch.bfloat16, 2.0**-8), "float16": (torch.float16, 1.0)}


@dataclass(frozen=True)
class Cast(Elements):
    """Each element as bfloat16 or float16, rounded to nearest, ties to even.

    float16 has three more bits of mantissa, but values beyond 65504 become inf and values below 2^-25 zero: scale the
    vector where that matters. bfloat16 has float32's range.

    Attributes:
        dtype: "bfloat16" or "float16".
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"the dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}{did_you_mean(self.dtype, DTYPES)}"
            )

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the elements in the payload."""
        return DTYPES[self.dtype][0]

    @property
    def bias(self) -> Contractive:
        """bfloat16 keeps each value to 2^-8; float16 guarantees nothing for a vector whose values all are below 2^-25."""
        return Contractive(1.0 - DTYPES[self.dtype][1] ** 2)


register("identity", Identity)
register("cast", Cast)
