"""Reference implementations of the block quantizers and of error feedback.

Two oracles with different purposes:

* the bit-exact one (`encode`, `decode`, `decode_sum`, `reduce`, `feedback`) follows docs/wire-format.md line by line, with
  one NumPy float32 operation for each rounded operation of the page;
* the mathematical one (`ideal`) is the quantiser in float64 and shares no step with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.oracles.minmax_uint8 import CANONICAL_NAN, F32, F64, U8, ZERO, dither

BOOL = npt.NDArray[np.bool_]
Counts = Sequence[int] | npt.NDArray[np.int64]
I64 = npt.NDArray[np.int64]

ONE = np.float32(1)
HALF = np.float32(0.5)


@dataclass(frozen=True)
class Float8:
    """An 8-bit float format.

    Attributes:
        mantissa: Bits of the mantissa.
        bias: Bias of the exponent.
        largest: Greatest finite value.
        largest_code: Code of `largest`.
    """

    mantissa: int
    bias: int
    largest: int
    largest_code: int


FLOAT8 = {"e4m3": Float8(3, 7, 448, 0x7E), "e5m2": Float8(2, 15, 57344, 0x7B)}


@dataclass(frozen=True)
class Spec:
    """A codec of the page.

    Attributes:
        kind: Family; `absmax` is also QSGD and TernGrad.
        block: Elements that share scales.
        levels: `L` of `minmax` and `absmax`; 0 stands for the greatest that `bits` can hold.
        bits: Bits of a code of `minmax` and `absmax`; the other kinds have a fixed number, see `code_bits`.
        stochastic: Whether `minmax`, `absmax` and `fp8` round stochastically; `natural` always does, `sign` never.
        norm: Scale of `absmax`.
        means: Number of means of `sign`.
        format: Format of `fp8`.
        shared: Whether the scales of `absmax` come from outside, as in TernGrad.
    """

    kind: Literal["minmax", "absmax", "sign", "natural", "fp8"]
    block: int
    levels: int = 0
    bits: int = 8
    stochastic: bool = False
    norm: Literal["max", "l2"] = "max"
    means: int = 1
    format: Literal["e4m3", "e5m2"] = "e4m3"
    shared: bool = False

    def __post_init__(self) -> None:
        if self.block not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"block must be a power of two from 32 to 4096, not {self.block}")
        if self.kind in ("minmax", "absmax") and not 0 <= self.levels <= self._most_levels:
            raise ValueError(f"{self.bits} bits cannot hold {self.levels} levels")

    @property
    def _most_levels(self) -> int:
        return (1 << self.bits) - 1 if self.kind == "minmax" else (1 << (self.bits - 1)) - 1

    @property
    def top(self) -> int:
        """`L` of the page."""
        return self.levels or self._most_levels

    @property
    def words(self) -> int:
        """Scales of a block."""
        return {"minmax": 2, "sign": self.means}.get(self.kind, 1)

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return {"sign": 1, "natural": 8, "fp8": 8}.get(self.kind, self.bits)


def _pad16(k: int) -> int:
    return -(-k // 16) * 16


def _block_count(spec: Spec, n: int) -> int:
    return -(-n // spec.block)


def codes_offset(spec: Spec, n: int) -> int:
    """Returns the byte at which the codes of a payload of `n` elements start."""
    return _pad16(4 * spec.words * _block_count(spec, n))


def payload_size(spec: Spec, n: int) -> int:
    """Returns the number of bytes of a payload of `n` elements."""
    if spec.code_bits == 8:
        return codes_offset(spec, n) + _pad16(n)
    return codes_offset(spec, n) + _pad16(_block_count(spec, n) * spec.block * spec.code_bits // 8)


def _to_blocks(spec: Spec, x: F32) -> F32:
    """Fills a vector up with +0 and returns it with one row for each block."""
    rows = np.zeros((_block_count(spec, x.size), spec.block), dtype=np.float32)
    rows.reshape(-1)[: x.size] = x
    return rows


def _present(spec: Spec, n: int, counts: Counts | None = None) -> BOOL:
    """Returns where `_to_blocks` has elements of the vector, or of the first so many in each block."""
    rows = _block_count(spec, n)
    inside = np.arange(rows * spec.block).reshape(rows, spec.block) < n
    return inside if counts is None else inside & (np.arange(spec.block) < np.array(counts).reshape(rows, 1))


def _pack(spec: Spec, codes: U8, n: int) -> U8:
    """Returns the bytes of codes that have one row for each block, without the final padding."""
    bits = spec.code_bits
    if bits == 8:
        return codes.reshape(-1)[:n]
    per_byte, width = 8 // bits, spec.block * bits // 8
    packed = np.zeros((len(codes), width), dtype=np.uint8)
    for slot in range(per_byte):
        packed |= codes[:, slot * width : (slot + 1) * width] << np.uint8(bits * slot)
    return packed.reshape(-1)


def _unpack(spec: Spec, payload: U8, n: int) -> U8:
    """Returns the codes of a payload, with one row for each block."""
    bits, rows = spec.code_bits, _block_count(spec, n)
    stored = payload[codes_offset(spec, n) :]
    codes = np.zeros((rows, spec.block), dtype=np.uint8)
    if bits == 8:
        codes.reshape(-1)[:n] = stored[:n]
        return codes
    width = spec.block * bits // 8
    packed = stored[: rows * width].reshape(rows, width)
    mask = np.uint8((1 << bits) - 1)
    for slot in range(8 // bits):
        codes[:, slot * width : (slot + 1) * width] = (packed >> np.uint8(bits * slot)) & mask
    return codes


def pre(m: F32) -> F32:
    """Returns `pre(m)` of the page for each block; 1 for NaN."""
    factor = np.where(m >= np.float32(2.0**126), np.float32(2.0**-2), ONE)
    return np.where(m < np.float32(2.0**-60), np.float32(2.0**80), factor)


def _exponent(m: F32) -> I64:
    field = (m.view(np.uint32) >> np.uint32(23)).astype(np.int64)
    return np.clip(field, 1, 253)


def _power_of_two(exponent: I64) -> F32:
    """Returns powers of two that are normal float32 numbers."""
    return ((exponent + 127).astype(np.uint32) << np.uint32(23)).view(np.float32)


def unit(m: F32) -> F32:
    """Returns `unit(m)` of the page for each block."""
    return _power_of_two(127 - _exponent(m))


def tree(z: F32) -> F32:
    """Returns for each row its sum in the page's order. A row has a power of two of numbers."""
    while z.shape[1] > 1:
        half = z.shape[1] // 2
        z = z[:, :half] + z[:, half:]
    return z[:, 0]


def _extremes(v: F32, present: BOOL) -> tuple[F32, F32]:
    """Returns for each row its least and its greatest value, where -0 counts as less than +0."""
    bits = v.view(np.int32)
    # Ordered as the numbers are: the magnitude bits of negative numbers are inverted.
    key = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    low = np.where(present, key, np.int32(0x7FFFFFFF)).min(axis=1)
    high = np.where(present, key, np.int32(-0x80000000)).max(axis=1)
    both = np.stack([low, high])
    lo, hi = np.where(both < 0, both ^ np.int32(0x7FFFFFFF), both).view(np.float32)
    some = present.any(axis=1)
    return np.where(some, lo, ZERO), np.where(some, hi, ZERO)


def _inverse(top: int, span: F32) -> F32:
    return np.where(span > ZERO, np.float32(top) / span, ZERO)


def _encode_minmax(spec: Spec, v: F32, present: BOOL, dithers: F32) -> tuple[F32, U8]:
    lo, hi = _extremes(v, present)
    factor = pre(np.maximum(np.abs(lo), np.abs(hi)))
    low = lo * factor
    span = hi * factor - low
    inv = _inverse(spec.top, span)
    t = (v * factor[:, None] - low[:, None]) * inv[:, None]
    if spec.stochastic:
        t = t + dithers
    q = np.clip(np.rint(t), ZERO, np.float32(spec.top))
    return np.stack((lo, hi), axis=1), q.astype(np.uint8)


def _decode_minmax(spec: Spec, scales: F32, codes: U8) -> F32:
    lo, hi = scales[:, 0], scales[:, 1]
    factor = pre(np.maximum(np.abs(lo), np.abs(hi)))
    low, high = lo * factor, hi * factor
    step = (high - low) / np.float32(spec.top)
    w = low[:, None] + codes.astype(np.float32) * step[:, None]
    w = np.where(codes == spec.top, high[:, None], w)
    value: F32 = w * (ONE / factor)[:, None]
    return value


def _l2_norm(v: F32, m: F32) -> F32:
    u = unit(m)
    y = v * u[:, None]
    root: F32 = np.sqrt(tree(y * y))
    norm: F32 = root / u
    return np.where(np.isinf(norm) & np.isfinite(m), np.finfo(np.float32).max, norm)


def _encode_absmax(spec: Spec, v: F32, s: F32, dithers: F32) -> U8:
    factor = pre(s)
    inv = _inverse(spec.top, s * factor)
    t = (v * factor[:, None]) * inv[:, None]
    if spec.stochastic:
        t = t + dithers
    q = np.clip(np.rint(t), np.float32(-spec.top), np.float32(spec.top))
    codes: U8 = (q.astype(np.int64) & ((1 << spec.bits) - 1)).astype(np.uint8)
    return codes


def _decode_absmax(spec: Spec, scales: F32, codes: U8) -> F32:
    s = scales[:, 0]
    integers = codes.astype(np.int64)
    integers = np.where(integers >= 1 << (spec.bits - 1), integers - (1 << spec.bits), integers)
    top = np.float32(spec.top)
    inverse = ONE / top
    if top * inverse < ONE:
        inverse = np.nextafter(inverse, np.float32(2))
    value: F32 = (integers.astype(np.float32) * inverse) * s[:, None]
    return value


def _encode_sign(spec: Spec, v: F32, m: F32, present: BOOL) -> tuple[F32, U8]:
    u = unit(m)
    y = v * u[:, None]
    negative = v < ZERO
    count = present.sum(axis=1)
    if spec.means == 1:
        sums, counts = [np.abs(v) * u[:, None]], [count]
    else:
        k = negative.sum(axis=1)
        sums, counts = [np.where(negative, -v * u[:, None], ZERO), np.where(negative, ZERO, y)], [k, count - k]
    means = [
        np.where(number > 0, tree(z) / number.astype(np.float32) / u, ZERO)
        for z, number in zip(sums, counts, strict=True)
    ]
    return np.stack(means, axis=1), negative.astype(np.uint8)


def _decode_sign(scales: F32, codes: U8) -> F32:
    return np.where(codes == 1, -scales[:, :1], scales[:, -1:])


def _encode_natural(v: F32, m: F32, dithers: F32) -> tuple[F32, U8]:
    u = unit(m)
    y = np.abs(v) * u[:, None]
    bits = y.view(np.uint32).astype(np.int64)
    x, f = bits >> 23, bits & 0x7FFFFF
    uniform = dithers + HALF
    small = uniform < y * np.float32(2.0**125)
    up = uniform * np.float32(2.0**23) < f.astype(np.float32)
    d = np.where(x < 2, small.astype(np.int64), np.minimum(x - 1 + up, 127))
    return ONE / u, (d + np.where((v < ZERO) & (d > 0), 128, 0)).astype(np.uint8)


def _decode_natural(scales: F32, codes: U8) -> F32:
    d = (codes & 0x7F).astype(np.int64)
    magnitude = _power_of_two(d - 126) * scales[:, :1]
    return np.where(d == 0, ZERO, np.where(codes >= 128, -magnitude, magnitude))


def _encode_fp8(spec: Spec, v: F32, s: F32, dithers: F32) -> U8:
    form = FLOAT8[spec.format]
    k, bias = form.mantissa, form.bias
    g = 23 - k
    factor = pre(s)
    inv = _inverse(form.largest, s * factor)
    t = np.abs(v * factor[:, None]) * inv[:, None]
    bits = t.view(np.uint32).astype(np.int64)
    scaled = t * np.float32(2.0 ** (bias - 1 + k))
    offset = (127 - bias) << k
    if spec.stochastic:
        subnormal = np.maximum(np.rint(scaled + dithers), ZERO).astype(np.int64)
        normal = ((bits + np.floor((dithers + HALF) * np.float32(2.0**g)).astype(np.int64)) >> g) - offset
    else:
        subnormal = np.rint(scaled).astype(np.int64)
        normal = ((bits + (1 << (g - 1)) - 1 + ((bits >> g) & 1)) >> g) - offset
    c = np.where(t < np.float32(2.0 ** (1 - bias)), subnormal, normal)
    c = np.minimum(c, form.largest_code)
    codes: U8 = (c + np.where((v < ZERO) & (c > 0), 128, 0)).astype(np.uint8)
    return codes


def _decode_fp8(spec: Spec, scales: F32, codes: U8) -> F32:
    form = FLOAT8[spec.format]
    k, bias = form.mantissa, form.bias
    s = scales[:, 0]
    factor = pre(s)
    largest = s * factor
    step = largest / np.float32(form.largest)
    c = (codes & 0x7F).astype(np.uint32)
    normal = ((c << np.uint32(23 - k)) + np.uint32((127 - bias) << 23)).view(np.float32)
    subnormal = c.astype(np.float32) * np.float32(2.0 ** (1 - bias - k))
    x = np.where(c >= 1 << k, normal, subnormal)
    w = np.where(c >= form.largest_code, largest[:, None], x * step[:, None])
    value: F32 = w * (ONE / factor)[:, None]
    return np.where(codes >= 128, -value, value)


def _dithers(spec: Spec, seed: int, n: int) -> F32:
    if spec.stochastic or spec.kind == "natural":
        return _to_blocks(spec, dither(seed, 0, n))
    return np.zeros((_block_count(spec, n), spec.block), dtype=np.float32)


def _scales_and_codes(spec: Spec, x: F32, seed: int, given: F32 | None, counts: Counts | None) -> tuple[F32, U8]:
    present = _present(spec, x.size, counts)
    v = np.where(present, _to_blocks(spec, x), ZERO)
    broken: BOOL = np.logical_or.reduce(~np.isfinite(v), axis=1)
    # Such blocks are computed as zeros and replaced at the end.
    v = np.where(broken[:, None], ZERO, v)
    m = np.abs(v).max(axis=1, initial=ZERO)
    dithers = _dithers(spec, seed, x.size)

    if spec.kind == "minmax":
        scales, codes = _encode_minmax(spec, v, present, dithers)
    elif spec.kind == "sign":
        scales, codes = _encode_sign(spec, v, m, present)
    elif spec.kind == "natural":
        p, codes = _encode_natural(v, m, dithers)
        scales = p[:, None]
    elif spec.kind == "fp8":
        scales, codes = m[:, None], _encode_fp8(spec, v, m, dithers)
    else:
        s = m
        if spec.shared:
            assert given is not None
            s = np.asarray(given, dtype=np.float32)
        elif spec.norm == "l2":
            s = _l2_norm(v, m)
        scales, codes = s[:, None], _encode_absmax(spec, v, s, dithers)

    scales = np.where(broken[:, None], CANONICAL_NAN, scales)
    return scales, np.where(present & ~broken[:, None], codes, np.uint8(0))


def encode(spec: Spec, x: F32, seed: int = 0, scales: F32 | None = None, counts: Counts | None = None) -> U8:
    """Encodes a vector.

    Args:
        spec: Codec.
        x: One-dimensional float32 vector.
        seed: Seed of stochastic rounding.
        scales: One scale for each block, exactly if `spec.shared`.
        counts: For each block how many of its first elements are its own; all of them if None.

    Returns:
        The payload.
    """
    if x.dtype != np.float32 or x.ndim != 1:
        raise TypeError("x must be a one-dimensional float32 array")
    if spec.shared != (scales is not None):
        raise ValueError("scales come with a shared spec, and only with one")
    if scales is not None and scales.shape != (_block_count(spec, x.size),):
        raise ValueError("one scale for each block")
    with np.errstate(all="ignore"):
        rows, codes = _scales_and_codes(spec, x, seed, scales, counts)
    payload = np.zeros(payload_size(spec, x.size), dtype=np.uint8)
    head = rows.astype("<f4", order="C").reshape(-1).view(np.uint8)
    body = _pack(spec, codes, x.size)
    offset = codes_offset(spec, x.size)
    payload[: head.size] = head
    payload[offset : offset + body.size] = body
    return payload


def block_scales(spec: Spec, payload: U8, n: int) -> F32:
    """Returns the scales of a payload, with one row for each block."""
    rows = _block_count(spec, n)
    return payload[: 4 * spec.words * rows].copy().view("<f4").astype(np.float32).reshape(rows, spec.words)


def decode(spec: Spec, payload: U8, n: int) -> F32:
    """Decodes a payload of `n` elements to float32."""
    if payload.shape != (payload_size(spec, n),):
        raise ValueError(f"a payload of {n} elements has {payload_size(spec, n)} bytes, not shape {payload.shape}")
    scales, codes = block_scales(spec, payload, n), _unpack(spec, payload, n)
    with np.errstate(all="ignore"):
        if spec.kind == "minmax":
            rows = _decode_minmax(spec, scales, codes)
        elif spec.kind == "absmax":
            rows = _decode_absmax(spec, scales, codes)
        elif spec.kind == "sign":
            rows = _decode_sign(scales, codes)
        elif spec.kind == "natural":
            rows = _decode_natural(scales, codes)
        else:
            rows = _decode_fp8(spec, scales, codes)
    rows = np.where(np.isnan(scales[:, :1]), CANONICAL_NAN, rows)
    return rows.astype(np.float32, copy=False).reshape(-1)[:n]


def decode_sum(spec: Spec, payloads: U8, n: int, scale: float) -> F32:
    """Decodes the payloads of all ranks, adds them in the order of the ranks and multiplies by `scale`.

    Args:
        spec: Codec.
        payloads: One row for each rank.
        n: Number of elements.
        scale: Factor, rounded to float32.
    """
    total = np.zeros(n, dtype=np.float32)
    with np.errstate(all="ignore"):
        for payload in payloads:
            total = total + decode(spec, payload, n)
        return total * np.float32(scale)


def reduce(spec: Spec, payloads: U8, n: int, scale: float, seed: int = 0, counts: Counts | None = None) -> U8:
    """Returns the payload of `decode_sum`; not for shared scales, which the page does not define for the result.

    Args:
        spec: Codec.
        payloads: One row for each rank.
        n: Number of elements.
        scale: Factor, rounded to float32.
        seed: Seed of stochastic rounding.
        counts: As for `encode`.
    """
    return encode(spec, decode_sum(spec, payloads, n, scale), seed, counts=counts)


def feedback(
    spec: Spec, x: F32, residual: F32, factor: float, seed: int = 0, counts: Counts | None = None
) -> tuple[U8, F32]:
    """Encodes with error feedback.

    Args:
        spec: Codec.
        x: One-dimensional float32 vector.
        residual: What earlier payloads left out.
        factor: `f` of the page, rounded to float32.
        seed: Seed of stochastic rounding.
        counts: As for `encode`; residuals of other elements stay.

    Returns:
        The payload and the new residual.
    """
    with np.errstate(all="ignore"):
        a = x + residual
        payload = encode(spec, a * np.float32(factor), seed, counts=counts)
        left = a - decode(spec, payload, x.size)
    left = np.where(np.isfinite(left), left, np.where(np.isfinite(residual), residual, ZERO))
    return payload, np.where(_present(spec, x.size, counts).reshape(-1)[: x.size], left, residual)


def _ideal_block(spec: Spec, v: F64) -> F64:
    """Returns what exact arithmetic makes of one finite block, nearest rounding."""
    magnitude = np.abs(v)
    greatest = magnitude.max()
    if spec.kind == "minmax":
        lo, hi = v.min(), v.max()
        grid = np.linspace(lo, hi, spec.top + 1)
        return v if lo == hi else _nearest(grid, v)
    if spec.kind == "sign":
        if spec.means == 1:
            mean: F64 = np.where(v < 0, -1.0, 1.0) * magnitude.mean()
            return mean
        side = v < 0
        out = v.copy()
        for part in (side, ~side):
            if part.any():
                out[part] = v[part].mean()
        return out
    if greatest == 0:
        return np.zeros_like(v)
    if spec.kind == "absmax":
        s = np.linalg.norm(v) if spec.norm == "l2" else greatest
        return _nearest(np.arange(-spec.top, spec.top + 1) / spec.top * s, v)
    if spec.kind == "fp8":
        form = FLOAT8[spec.format]
        powers = 2.0 ** np.arange(1 - form.bias, 17)
        fractions = np.arange(1 << form.mantissa) / (1 << form.mantissa)
        positive = np.concatenate([fractions * powers[0], (powers[:, None] * (1 + fractions)).ravel()])
        positive = positive[positive <= form.largest] / form.largest * greatest
        return _nearest(np.concatenate([-positive[:0:-1], positive]), v)
    raise ValueError(f"{spec.kind} has no deterministic ideal")


def _nearest(grid: F64, v: F64) -> F64:
    """Returns for each value the nearest number of an ascending grid, the greater one at ties."""
    above = np.clip(np.searchsorted(grid, v), 1, grid.size - 1)
    nearest: F64 = np.where(v - grid[above - 1] < grid[above] - v, grid[above - 1], grid[above])
    return nearest


def ideal(spec: Spec, x: F32) -> F64:
    """Returns what the quantiser with exact arithmetic and nearest rounding makes of `x`.

    Blocks that are not finite become NaN. Which of two equally near grid points is taken is not the page's choice.

    Args:
        spec: Codec of kind `minmax`, `absmax`, `sign` or `fp8`.
        x: One-dimensional vector.
    """
    out = np.full(x.size, np.nan)
    for start in range(0, x.size, spec.block):
        v = x[start : start + spec.block].astype(np.float64)
        if np.isfinite(v).all():
            out[start : start + spec.block] = _ideal_block(spec, v)
    return out
