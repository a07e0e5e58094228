"""Chunked top-k: the largest elements of each chunk, with two magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.compression.codec import Contractive, register
from bagua_kernels.compression.sparse.codec import check_beside
from bagua_kernels.launchers import chunks
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector
from bagua_kernels.launchers.chunks import Record


@dataclass(frozen=True)
class ChunkedTopK:
    """The k elements of largest magnitude of each chunk: their signs, and one of two magnitudes (SparseLoCo, Sarfi et al., 2025).

    Positions are in Elias-Fano's code. 64 of 4096 elements take 84 bytes: 0.0205 bytes per element. Of equal magnitudes those
    of lowest index are kept. A value that is not finite decodes to NaN in its place. See `docs/wire-format-sparse.md`.

    Attributes:
        k: kept elements of a chunk, from 1 to `chunk`.
        chunk: elements of a chunk, a power of two from 32 to 4096. Tensors in a vector are best aligned at multiples of it.
    """

    k: int = 64
    chunk: int = 4096

    linear = False
    stochastic = False

    def __post_init__(self) -> None:
        for name in ("k", "chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not 32 <= self.chunk <= 4096 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two from 32 to 4096, got {self.chunk}")
        if not 1 <= self.k <= self.chunk:
            raise ValueError(f"k must be from 1 to chunk, got k={self.k} and chunk={self.chunk}")

    @property
    def block(self) -> int:
        """Elements of a chunk."""
        return self.chunk

    @property
    def bias(self) -> Contractive:
        """For magnitudes above 2^-86: 1 / (2 chunk) of the square norm, less 2^-7 of that for bfloat16.

        The k largest values of a chunk have k / chunk of its square norm. In a shorter last chunk their number is rounded, and
        they have at least half of that. One magnitude, their mean m, would lose |v|^2 - k m^2 of |v|^2, and two lose no more.
        Since |v|^2 <= k^2 m^2, 1 / k of |v|^2 is kept.
        """
        return Contractive((1 - 2.0**-7) / (2 * self.chunk))

    @property
    def _record(self) -> Record:
        return Record(self.k, self.chunk)

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        return self._record.size(n)

    @torch.no_grad()
    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector of shape (n,), float32, float16 or bfloat16; see `Codec.encode`.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit.
            BackendUnavailableError: no kernel backend serves the device.
        """
        return self._encode(x, out, None, None, 1.0)

    @torch.no_grad()
    def encode_feedback(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        beta: float = 1.0,
        seed: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes v = beta residual + x, and makes what the payload lacks of it the new residual, in one pass.

        Args:
            x: shape (n,), float32, float16 or bfloat16.
            residual: shape (n,), float32; updated. It is 0 where v is not finite.
            beta: factor of the residual.
            seed: of no use.
            out: as in `encode`.

        Returns:
            The payload. Errors as in `encode`.
        """
        check_beside("residual", residual, x)
        return self._encode(x, out, residual, None, beta)

    @torch.no_grad()
    def encode_outer(
        self,
        start: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        beta: float = 1.0,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `encode_feedback` of the pseudo-gradient start - x, which is not written: three vectors read, one written.

        Args:
            start: shape (n,), float32; rounded to the dtype of `x` first, so that the difference of equal parameters is zero.
            x: shape (n,), float32, float16 or bfloat16.
            residual: as in `encode_feedback`.
            beta: factor of the residual.
            out: as in `encode`.

        Returns:
            The payload. Errors as in `encode`.
        """
        check_beside("residual", residual, x)
        check_beside("start", start, x)
        return self._encode(x, out, residual, start, beta)

    def _encode(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        residual: torch.Tensor | None,
        start: torch.Tensor | None,
        beta: float,
    ) -> torch.Tensor:
        check_vector("x", x, FLOAT_DTYPES)
        record, n = self._record, x.numel()
        if out is None:
            out = torch.empty(record.size(n), dtype=torch.uint8, device=x.device)
        check_bytes("out", out, (record.size(n),), x.device, f"{n=}")
        if n:
            records = record.of(out, n)
            out[records.numel() * 4 :] = 0
            chunks.encode(x, records, record, residual, start, beta)
        return out

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,), zeros where nothing was kept.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit, or the payload is damaged; `out` is then
                unspecified.
        """
        return self._add_up(payload[None], out, 1.0, False)

    @torch.no_grad()
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of payloads of shape (ranks, payload_size(n)), decoded, to `out`; as `decode`.

        Sums are taken in float32, in the order of the ranks, and rounded to the dtype of `out` at the end.
        """
        return self._add_up(payloads, out, scale, False)

    @torch.no_grad()
    def mean(self, payloads: torch.Tensor, out: torch.Tensor, *, contributors: bool = True) -> torch.Tensor:
        """Writes the mean of payloads of shape (ranks, payload_size(n)), decoded, to `out`; as `decode`.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8.
            out: shape (n,).
            contributors: True to divide each element by the number of ranks that have sent it, False by that of all ranks.
        """
        return self._add_up(payloads, out, 1.0 / max(1, len(payloads)), contributors)

    def _add_up(self, payloads: torch.Tensor, out: torch.Tensor, scale: float, contributors: bool) -> torch.Tensor:
        check_vector("out", out, FLOAT_DTYPES)
        record, n = self._record, out.numel()
        check_bytes("payloads", payloads, (-1, record.size(n)), out.device, f"{n=}")
        if n == 0:
            return out
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        if not chunks.decode_sum(record.of(payloads, n), total, record, scale, contributors):
            raise ValueError(
                f"the payload is damaged: expected {self.k} ascending indices of each chunk of {self.chunk} elements"
            )
        return out if total is out else out.copy_(total)

    @torch.no_grad()
    def reduce(
        self, payloads: torch.Tensor, n: int, *, scale: float = 1.0, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of all decoded payloads; see `Codec.reduce`. Errors as in `encode` and `decode`."""
        total = torch.empty(n, dtype=torch.float32, device=payloads.device)
        return self.encode(self.decode_sum(payloads, total, scale), out=out)


register("chunked_topk", ChunkedTopK)
