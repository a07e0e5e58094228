"""What codecs of the elements of largest magnitude share."""

from __future__ import annotations

from fractions import Fraction

import torch

from bagua_kernels.compression.cast import Identity
from bagua_kernels.compression.sparse.choice import choose, sample_size
from bagua_kernels.compression.sparse.codec import SparseCodec, check_beside
from bagua_kernels.compression.sparse.form import SparseForm
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector
from bagua_kernels.launchers.select import BAD_ENDS, BAD_OFFSETS, INFINITE, place, place_sum


class Largest(SparseCodec):
    """A codec of the elements of largest magnitude; subclasses choose their number, exactly or approximately.

    Attributes:
        sample: part of the elements in the sample that estimates a threshold.
        aim: multiple of the wanted number of entries that the first threshold aims at.
    """

    block = 1
    linear = False
    shared_seed = False

    sample: float
    aim: Fraction

    @property
    def stochastic(self) -> bool:
        """True if the codec of the values needs a seed."""
        return bool(self.values.stochastic)

    def _kept(self, n: int) -> tuple[int, int, int]:
        """The wanted, the least and the greatest number of entries."""
        raise NotImplementedError

    def _form(self, n: int) -> SparseForm:
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        capacity = self._kept(n)[2]
        if capacity >= 1 << 31:
            raise ValueError(
                f"a payload holds fewer than 2**31 entries, got {capacity}; cut the vector or lower the ratio"
            )
        return SparseForm(n, capacity, True, self.values.payload_size(capacity))

    @torch.no_grad()
    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector of shape (n,), float32, float16 or bfloat16; see `Codec.encode`.

        The number of elements found decides what is done next, so on a GPU the call waits for it.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device, alignment or the seed does not fit.
            BackendUnavailableError: no kernel backend serves the device.
        """
        return self._encode(x, None, seed, out)

    @torch.no_grad()
    def encode_feedback(
        self, x: torch.Tensor, residual: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes a = x + residual, and makes what the payload lacks of it the new residual.

        What is not finite is not kept: the residual is 0 there. A finite value that decodes to NaN, since its codec's block holds
        another that is not finite, is kept whole.

        Args:
            x: shape (n,), float32, float16 or bfloat16.
            residual: shape (n,), float32; a - C(a) afterwards.
            seed: as in `encode`.
            out: as in `encode`.

        Returns:
            The payload. Errors as in `encode`.
        """
        check_beside("residual", residual, x)
        return self._encode(x, residual, seed, out)

    def _encode(
        self, x: torch.Tensor, residual: torch.Tensor | None, seed: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        check_vector("x", x, FLOAT_DTYPES)
        form, out = self._payload(x, out)
        if form.n == 0:
            return out
        header, ends, offsets, encoded = form.parts(out)
        plain = isinstance(self.values, Identity)
        # Values that are kept as they are need no memory in between.
        values = encoded.view(torch.float32) if plain else x.new_empty(form.capacity, dtype=torch.float32)
        k, low, high = self._kept(form.n)
        sample = sample_size(form.n, self.sample, self.ratio)
        chosen = choose(x, residual, offsets, values, k=k, low=low, high=high, rank=self.aim, sample=sample)
        header[0] = chosen.count
        header[1] = 0
        ends[: form.chunks] = chosen.ends
        ends[form.chunks :] = 0
        offsets[chosen.count :] = 0
        values[chosen.count :] = 0
        if not plain:
            self.values.encode(values, seed=seed, out=encoded)
        if residual is not None:
            values = values[: form.capacity]
            decoded = self.values.decode(encoded, torch.empty_like(values))
            lost = torch.where(decoded.isnan(), values, values - decoded).nan_to_num_(0.0, 0.0, 0.0)
            place(ends[: form.chunks], offsets[: form.capacity], lost, residual)
            if chosen.threshold >= INFINITE:
                residual.masked_fill_(~residual.isfinite(), 0)
        return out

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,), zeros where nothing was kept.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device or alignment does not fit, or the payload is damaged; `out` is then
                unspecified.
        """
        check_vector("out", out, FLOAT_DTYPES)
        form = self._form(out.numel())
        check_bytes("payload", payload, (form.size,), out.device, f"n={form.n}")
        if form.n:
            counts, ends, offsets, values = self._entries(payload[None], form, out.dtype)
            self._check(counts, place(ends[0], offsets[0], values[0], out.zero_()), form)
        return out

    def _add_up(self, payloads: torch.Tensor, form: SparseForm, total: torch.Tensor, scale: float) -> None:
        counts, ends, offsets, values = self._entries(payloads, form, torch.float32)
        self._check(counts, place_sum(ends, offsets, values, total, scale), form)

    def _entries(
        self, payloads: torch.Tensor, form: SparseForm, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The counts that headers and ends give, shape (rows, 2), and the ends, offsets and values of all rows.

        Encoded values of all rows are decoded at once; they are a small part of each vector.
        """
        header, ends, offsets, encoded = form.parts(payloads)
        ends, offsets = ends[:, : form.chunks], offsets[:, : form.capacity]
        if isinstance(self.values, Identity) and dtype == torch.float32:
            values = encoded.view(torch.float32)[:, : form.capacity]
        else:
            values = torch.empty((len(payloads), form.capacity), dtype=dtype, device=payloads.device)
            for row, decoded in zip(encoded, values, strict=True):
                self.values.decode(row, decoded)
        return torch.stack([header[:, 0], ends[:, -1].long()], dim=1), ends, offsets, values

    def _check(self, counts: torch.Tensor, wrong: int, form: SparseForm) -> None:
        """Raises unless headers count what is allowed, ends end there, and nothing was found wrong with the entries."""
        _, low, high = self._kept(form.n)
        allowed = f"{low}" if low == high else f"{low} to {high}"
        # waits: a damaged payload raises before its values are used.
        for count, last in counts.tolist():
            if not low <= count <= high:
                raise ValueError(f"the payload is damaged: its header counts {count} entries, expected {allowed}")
            if last != count:
                raise ValueError(
                    f"the payload is damaged: the ends of its chunks do not ascend to the count of {count} entries, got {last}"
                )
        if wrong & BAD_ENDS:
            raise ValueError("the payload is damaged: the ends of its chunks do not ascend")
        if wrong & BAD_OFFSETS:
            raise ValueError("the payload is damaged: offsets in a chunk do not ascend or lie beyond its end")
