"""What sparsifying codecs share: how many elements are kept, the payload's layout, and the choice of the largest."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from bagua_kernels.compression.cast import Identity
from bagua_kernels.compression.codec import Codec, Contractive, Unbiased, from_spec
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector, padded
from bagua_kernels.launchers.select import BAD_ENDS, BAD_OFFSETS, CHUNK, INFINITE, Collected, place, place_sum
from bagua_kernels.rules.random import mix

HEADER = 16
# A sample is made of runs, so that each cache line that is fetched is used.
RUN = 32
_mixed: Callable[[Any], Any] = mix
# Vectors up to this length are their own sample; a longer one's sample has at most so many elements, or 512 / ratio.
WHOLE = 8192
LARGEST_SAMPLE = 65_536


def kept(ratio: float, n: int) -> int:
    """min(n, max(1, floor(ratio n))), of the ratio as it is written in decimal: 0.29 of 100 elements are 29."""
    return min(n, max(1, math.floor(Fraction(repr(ratio)) * n)))


def checked_fraction(name: str, value: float) -> float:
    """`value` as a float, if it is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
    return float(value)


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


@dataclass(frozen=True)
class Layout:
    """Where the parts of a payload lie.

    Attributes:
        n: number of elements.
        capacity: number of entries that there is room for.
        indexed: whether the positions are in the payload.
        value_bytes: bytes of the encoded values.
    """

    n: int
    capacity: int
    indexed: bool
    value_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks of 65,536 elements."""
        return -(-self.n // CHUNK)

    @property
    def index_bytes(self) -> tuple[int, int]:
        """Bytes of the ends and of the offsets."""
        return (padded(4 * self.chunks), padded(2 * self.capacity)) if self.indexed else (0, 0)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return HEADER + sum(self.index_bytes) + self.value_bytes if self.n else 0

    def parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the header, the ends and the offsets (as int64, int32, int16) and of the values' bytes, with pads.

        The payload may have rows, and the views have them then, too.
        """
        header, ends, offsets, values = payload.split([HEADER, *self.index_bytes, self.value_bytes], dim=-1)
        return header.view(torch.int64), ends.view(torch.int32), offsets.view(torch.int16), values


@functools.lru_cache(maxsize=64)
def sampled_runs(n: int, size: int) -> torch.Tensor:
    """Which runs of 32 elements make a sample: one from each of equal strata, where a hash of its number says."""
    runs = n // RUN
    number = np.arange(size // RUN, dtype=np.int64)
    first = number * runs // number.size
    length = (number + 1) * runs // number.size - first
    with np.errstate(over="ignore"):
        hashed = _mixed(number.astype(np.uint32)).astype(np.int64)
    return torch.from_numpy(first + hashed % length)


def sample_keys(x: torch.Tensor, residual: torch.Tensor | None, size: int) -> torch.Tensor:
    """Keys of a sample of `x`, or of the sum with `residual`, int32; the same elements on every device."""

    def taken(v: torch.Tensor) -> torch.Tensor:
        if size >= v.numel():
            return v.float()
        runs = sampled_runs(v.numel(), size).to(v.device)
        return v[: v.numel() // RUN * RUN].view(-1, RUN).index_select(0, runs).view(-1).float()

    values = taken(x) if residual is None else taken(residual) + taken(x)
    return values.view(torch.int32) & 0x7FFFFFFF


def sample_size(n: int, sample: float, ratio: float) -> int:
    """The size of the sample of a vector: all of it, or a multiple of 32."""
    wanted = max(WHOLE, min(math.ceil(sample * n), max(LARGEST_SAMPLE, math.ceil(512 / ratio))))
    return n if wanted >= n else wanted // RUN * RUN


def largest(keys: torch.Tensor, k: int) -> int:
    """The k-th largest key."""
    if keys.device.type == "cpu":
        # NumPy selects with vector instructions.
        return int(np.partition(keys.numpy(), keys.numel() - k)[keys.numel() - k])
    return int(torch.topk(keys, k, sorted=False).values.min())


@dataclass(frozen=True)
class Chosen:
    """The entries that were chosen.

    Attributes:
        ends: shape (chunks,), int64: number of entries in each chunk and all before.
        count: number of entries.
        threshold: the least key among them.
    """

    ends: torch.Tensor
    count: int
    threshold: int


def choose(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    offsets: torch.Tensor,
    values: torch.Tensor,
    *,
    k: int,
    low: int,
    high: int,
    rank: Fraction,
    sample: int,
) -> Chosen:
    """Chooses about `k` elements of the largest magnitude, and writes them in the order of their index.

    A threshold is estimated from a sample, and lowered until at least `low` elements reach it. If more than `high` do, the
    exact `k` largest are taken among them, the lowest indices where magnitudes are equal. With `low` = `high` = `k` the
    result is the exact one.

    Args:
        x: shape (n,), n >= 1.
        residual: shape (n,), float32; if given, becomes `residual + x`, from which the elements are chosen.
        offsets: shape (high or more,), int16; the first `count` are written.
        values: shape (high or more,), float32; the first `count` are written.
        k: number of elements wanted.
        low: least number of elements that is accepted.
        high: greatest number of elements that is accepted.
        rank: multiple of `k` that the first threshold aims at.
        sample: size of the sample.
    """
    n = x.numel()
    keys = sample_keys(x, residual, sample)
    aim = k if sample == n else max(1, math.ceil(rank * k * sample / n))
    while True:
        threshold = largest(keys, aim) if aim <= sample else 0
        found = Collected(x, threshold, residual, expected=aim * n // sample)
        if found.count >= low:
            break
        x, residual, aim = (x, None, 2 * aim) if residual is None else (residual, None, 2 * aim)
    if found.count <= high:
        found.write(offsets, values)
        return Chosen(found.ends, found.count, threshold)
    all_offsets = torch.empty(found.count, dtype=torch.int16, device=x.device)
    all_values = torch.empty(found.count, dtype=torch.float32, device=x.device)
    found.write(all_offsets, all_values)
    keys = all_values.view(torch.int32) & 0x7FFFFFFF
    threshold = largest(keys, k)
    above, equal = keys > threshold, keys == threshold
    ties = k - above.sum()
    chosen = above | (equal & (equal.cumsum(0) <= ties))
    index = chosen.nonzero().view(-1)
    offsets[:k] = all_offsets[index]
    values[:k] = all_values[index]
    before = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    return Chosen(before[found.ends], k, threshold)


class SparseCodec(ABC):
    """What codecs of some of the elements share, however these are chosen."""

    @abstractmethod
    def _layout(self, n: int) -> Layout:
        """The layout of a payload of `n` elements, whose number is checked."""

    @abstractmethod
    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Codec.encode`."""

    @abstractmethod
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See `Codec.decode_sum`."""

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        return self._layout(n).size

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
        self._layout(n)
        total = torch.empty(n, dtype=torch.float32, device=payloads.device)
        return self.encode(self.decode_sum(payloads, total, scale), seed=seed, out=out)


class Largest(SparseCodec):
    """A codec of the elements of largest magnitude; subclasses say how many, and how exactly."""

    block = 1
    linear = False
    shared_seed = False

    ratio: float
    values: Any

    @property
    def stochastic(self) -> bool:
        """Whether the codec of the values needs a seed."""
        return bool(self.values.stochastic)

    def _kept(self, n: int) -> tuple[int, int, int]:
        """The wanted, the least and the greatest number of entries."""
        raise NotImplementedError

    def _choose(
        self, x: torch.Tensor, residual: torch.Tensor | None, offsets: torch.Tensor, values: torch.Tensor
    ) -> Chosen:
        raise NotImplementedError

    def _layout(self, n: int) -> Layout:
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        capacity = self._kept(n)[2]
        if capacity >= 1 << 31:
            raise ValueError(
                f"a payload holds fewer than 2**31 entries, got {capacity}; cut the vector or lower the ratio"
            )
        return Layout(n, capacity, True, self.values.payload_size(capacity))

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
        check_residual(residual, x)
        return self._encode(x, residual, seed, out)

    def _encode(
        self, x: torch.Tensor, residual: torch.Tensor | None, seed: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        check_vector("x", x, FLOAT_DTYPES)
        layout = self._layout(x.numel())
        if out is None:
            out = torch.empty(layout.size, dtype=torch.uint8, device=x.device)
        check_bytes("out", out, (layout.size,), x.device, f"n={layout.n}")
        if layout.n == 0:
            return out
        header, ends, offsets, encoded = layout.parts(out)
        plain = isinstance(self.values, Identity)
        # Values that are kept as they are need no memory in between.
        values = encoded.view(torch.float32) if plain else x.new_empty(layout.capacity, dtype=torch.float32)
        chosen = self._choose(x, residual, offsets, values)
        header[0] = chosen.count
        header[1] = 0
        ends[: layout.chunks] = chosen.ends
        ends[layout.chunks :] = 0
        offsets[chosen.count :] = 0
        values[chosen.count :] = 0
        if not plain:
            self.values.encode(values, seed=seed, out=encoded)
        if residual is not None:
            values = values[: layout.capacity]
            decoded = self.values.decode(encoded, torch.empty_like(values))
            lost = torch.where(decoded.isnan(), values, values - decoded).nan_to_num_(0.0, 0.0, 0.0)
            place(ends[: layout.chunks], offsets[: layout.capacity], lost, residual)
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
        layout = self._layout(out.numel())
        check_bytes("payload", payload, (layout.size,), out.device, f"n={layout.n}")
        if layout.n:
            counts, ends, offsets, values = self._entries(payload[None], layout, out.dtype)
            self._check(counts, place(ends[0], offsets[0], values[0], out.zero_()), layout)
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
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        counts, ends, offsets, values = self._entries(payloads, layout, torch.float32)
        self._check(counts, place_sum(ends, offsets, values, total, scale), layout)
        return out if total is out else out.copy_(total)

    def _entries(
        self, payloads: torch.Tensor, layout: Layout, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The counts that headers and ends give, shape (rows, 2), and the ends, offsets and values of all rows.

        Values that are encoded take memory for all rows at once, which are few elements of each vector.
        """
        header, ends, offsets, encoded = layout.parts(payloads)
        ends, offsets = ends[:, : layout.chunks], offsets[:, : layout.capacity]
        if isinstance(self.values, Identity) and dtype == torch.float32:
            values = encoded.view(torch.float32)[:, : layout.capacity]
        else:
            values = torch.empty((len(payloads), layout.capacity), dtype=dtype, device=payloads.device)
            for row, decoded in zip(encoded, values, strict=True):
                self.values.decode(row, decoded)
        return torch.stack([header[:, 0], ends[:, -1].long()], dim=1), ends, offsets, values

    def _check(self, counts: torch.Tensor, wrong: int, layout: Layout) -> None:
        """Raises unless headers count what is allowed, ends end there, and nothing was found wrong with the entries."""
        _, low, high = self._kept(layout.n)
        allowed = f"{low}" if low == high else f"{low} to {high}"
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


def check_residual(residual: torch.Tensor, x: torch.Tensor) -> None:
    """Raises unless `residual` is a contiguous float32 vector as long as `x`, on the same device."""
    check_vector("x", x, FLOAT_DTYPES)
    check_vector("residual", residual, (torch.float32,))
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"residual must have shape {tuple(x.shape)} on {x.device}, got {tuple(residual.shape)} on {residual.device}"
        )
