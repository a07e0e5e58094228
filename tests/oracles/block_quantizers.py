"""Reference implementations of the block quantizers and of error feedback.

Two oracles with different purposes:

* the bit-exact one (`encode`, `decode`, `decode_sum`, `reduce`, `feedback`) follows docs/wire-format.md line by line, with
  one NumPy float32 operation for each rounded operation of the page;
* the mathematical one (`ideal`) is the quantiser in float64 and shares no step with it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.oracles import two_magnitudes
from tests.oracles.block_rules import (
    BOOL,
    FLOAT8,
    Spec,
    decode_absmax,
    decode_fp8,
    decode_minmax,
    decode_natural,
    decode_sign,
    encode_absmax,
    encode_fp8,
    encode_minmax,
    encode_natural,
    encode_sign,
    l2_norm,
)
from tests.oracles.minmax_uint8 import CANONICAL_NAN, F32, F64, U8, ZERO, dither

Counts = Sequence[int] | npt.NDArray[np.int64]


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
        scales, codes = encode_minmax(spec, v, present, dithers)
    elif spec.kind == "sign":
        scales, codes = encode_sign(spec, v, m, present)
    elif spec.kind == "magnitudes":
        words, codes = two_magnitudes.encode(v, m, present)
        scales = words[:, None]
    elif spec.kind == "natural":
        p, codes = encode_natural(v, m, dithers)
        scales = p[:, None]
    elif spec.kind == "fp8":
        scales, codes = m[:, None], encode_fp8(spec, v, m, dithers)
    else:
        s = m
        if spec.shared:
            assert given is not None
            s = np.asarray(given, dtype=np.float32)
        elif spec.norm == "l2":
            s = l2_norm(v, m)
        scales, codes = s[:, None], encode_absmax(spec, v, s, dithers)

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
            rows = decode_minmax(spec, scales, codes)
        elif spec.kind == "absmax":
            rows = decode_absmax(spec, scales, codes)
        elif spec.kind == "sign":
            rows = decode_sign(scales, codes)
        elif spec.kind == "magnitudes":
            rows = two_magnitudes.decode(scales, codes)
        elif spec.kind == "natural":
            rows = decode_natural(scales, codes)
        else:
            rows = decode_fp8(spec, scales, codes)
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
    if spec.kind == "magnitudes":
        return two_magnitudes.ideal(v)
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
        spec: Codec of any kind but `natural`.
        x: One-dimensional vector.
    """
    out = np.full(x.size, np.nan)
    for start in range(0, x.size, spec.block):
        v = x[start : start + spec.block].astype(np.float64)
        if np.isfinite(v).all():
            out[start : start + spec.block] = _ideal_block(spec, v)
    return out
