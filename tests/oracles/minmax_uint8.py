"""Reference implementations of the MinMaxUInt8 wire format.

Three oracles with different purposes:

* the bit-exact one (`encode`, `decode`, `reduce`, `decode_sum`, `random`, `dither`) follows docs/wire-format.md line by
  line, with one NumPy float32 operation for each rounded operation of the page;
* the mathematical one (`ideal_decode`, `error_bound`) is the uniform quantiser in float64 and shares no step with it;
* `bagua_formula` is the older formula with the absolute epsilon, kept to show where it leaves 0 ... 255.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

GOLDEN_RATIO = 0x9E3779B9
NAN_BITS = 0x7FC00000
LEVELS = np.float32(255)
ZERO = np.float32(0)
CANONICAL_NAN = np.array([NAN_BITS], dtype="<u4").view("<f4")[0]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


# ----------------------------------------------------------------------------------------------- random numbers


def mix(x: U32) -> U32:
    """Applies the page's 32-bit mixing function to each element."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_at(seed: int, index: U64) -> U32:
    """Returns `r(e)` for arbitrary element indices.

    Args:
        seed: 64-bit seed; other integers are taken modulo 2^64.
        index: Element indices.
    """
    s0 = np.uint32(seed & _MASK32)
    s1 = np.uint32((seed >> 32) & _MASK32)
    e0 = (index & np.uint64(_MASK32)).astype(np.uint32)
    e1 = (index >> np.uint64(32)).astype(np.uint32)

    k0 = mix(s0 ^ mix(s1 ^ mix(e1 + np.uint32(GOLDEN_RATIO))))
    k1 = mix(s1 ^ mix(s0 ^ mix(e1 + np.uint32(0x85EBCA6B))))

    x = e0 * np.uint32(GOLDEN_RATIO) + k0
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ k1
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random(seed: int, first_index: int, n: int) -> U32:
    """Returns `r(e)` for the `n` elements that start at `first_index`.

    Args:
        seed: 64-bit seed; other integers are taken modulo 2^64.
        first_index: Index of the first element, 64 bits.
        n: Number of elements.
    """
    return random_at(seed, np.uint64(first_index & _MASK64) + np.arange(n, dtype=np.uint64))


def dither(seed: int, first_index: int, n: int) -> F32:
    """Returns `dither(e)`, in [-0.5, 0.5), for the `n` elements that start at `first_index`.

    Args:
        seed: 64-bit seed.
        first_index: Index of the first element.
        n: Number of elements.
    """
    top24 = (random(seed, first_index, n) >> np.uint32(8)).astype(np.float32)
    return top24 * np.float32(2.0**-24) - np.float32(0.5)


# ------------------------------------------------------------------------------------------------ payload layout


def _pad16(k: int) -> int:
    return -(-k // 16) * 16


def _check_block(block: int) -> None:
    if block not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"block must be a power of two from 32 to 4096, not {block}")


def _blocks(n: int, block: int) -> Iterator[tuple[int, slice]]:
    for number, start in enumerate(range(0, n, block)):
        yield number, slice(start, min(start + block, n))


def codes_offset(n: int, block: int = 256) -> int:
    """Returns the byte at which the codes of a payload of `n` elements start."""
    _check_block(block)
    return _pad16(8 * -(-n // block))


def payload_size(n: int, block: int = 256) -> int:
    """Returns the number of bytes of a payload of `n` elements."""
    return codes_offset(n, block) + _pad16(n)


# ---------------------------------------------------------------------------------------------- bit-exact oracle


def _extremes(v: F32) -> tuple[np.float32, np.float32]:
    """Returns the least and the greatest value of a finite block, where -0 counts as less than +0."""
    lo, hi = v.min(), v.max()
    # A zero from min() or max() has the sign of whichever zero NumPy met, hence the explicit choice.
    if lo == 0:
        lo = np.float32(-0.0) if np.signbit(v[v == 0]).any() else np.float32(0.0)
    if hi == 0:
        hi = np.float32(-0.0) if np.signbit(v[v == 0]).all() else np.float32(0.0)
    return lo, hi


def _pre(lo: np.float32, hi: np.float32) -> np.float32:
    m = max(abs(lo), abs(hi))
    if m >= np.float32(2.0**126):
        return np.float32(2.0**-2)
    if m < np.float32(2.0**-60):
        return np.float32(2.0**80)
    return np.float32(1)


def encode(x: F32, block: int = 256, seed: int | None = None) -> U8:
    """Encodes a vector.

    Args:
        x: One-dimensional float32 vector.
        block: Elements that share one `lo` and `hi`.
        seed: None rounds to nearest, an integer rounds stochastically.

    Returns:
        The payload.
    """
    if x.dtype != np.float32 or x.ndim != 1:
        raise TypeError("x must be a one-dimensional float32 array")
    n = x.size
    payload = np.zeros(payload_size(n, block), dtype=np.uint8)
    scales = payload[: 8 * -(-n // block)].view("<f4").reshape(-1, 2)
    codes = payload[codes_offset(n, block) :][:n]

    for number, where in _blocks(n, block):
        v = x[where]
        if not np.isfinite(v).all():
            scales[number] = CANONICAL_NAN
            continue
        lo, hi = _extremes(v)
        scales[number] = lo, hi
        pre = _pre(lo, hi)
        low = lo * pre
        span = hi * pre - low
        inv = LEVELS / span if span > 0 else ZERO
        t = (v * pre - low) * inv
        if seed is not None:
            t = t + dither(seed, where.start, v.size)
        codes[where] = np.clip(np.rint(t), ZERO, LEVELS).astype(np.uint8)
    return payload


def decode(payload: U8, n: int, block: int = 256) -> F32:
    """Decodes a payload of `n` elements to float32."""
    if payload.shape != (payload_size(n, block),):
        raise ValueError(f"a payload of {n} elements has {payload_size(n, block)} bytes, not shape {payload.shape}")
    scales = payload[: 8 * -(-n // block)].copy().view("<f4").reshape(-1, 2)
    codes = payload[codes_offset(n, block) :][:n].astype(np.float32)
    out = np.empty(n, dtype=np.float32)

    for number, where in _blocks(n, block):
        lo, hi = scales[number]
        if np.isnan(lo):
            out[where] = CANONICAL_NAN
            continue
        pre = _pre(lo, hi)
        post = np.float32(1) / pre
        low, high = lo * pre, hi * pre
        step = (high - low) / LEVELS
        w = np.where(codes[where] == LEVELS, high, low + codes[where] * step)
        out[where] = w * post
    return out


def decode_sum(payloads: U8, n: int, scale: float, block: int = 256) -> F32:
    """Decodes the payloads of all ranks, adds them in the order of the ranks and multiplies by `scale`.

    Args:
        payloads: One row for each rank.
        n: Number of elements.
        scale: Factor, rounded to float32.
        block: Elements that share one `lo` and `hi`.
    """
    total = np.zeros(n, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for payload in payloads:
            total = total + decode(payload, n, block)
        return total * np.float32(scale)


def reduce(payloads: U8, n: int, scale: float, block: int = 256, seed: int | None = None) -> U8:
    """Returns the payload of `decode_sum`.

    Args:
        payloads: One row for each rank.
        n: Number of elements.
        scale: Factor, rounded to float32.
        block: Elements that share one `lo` and `hi`.
        seed: None rounds to nearest, an integer rounds stochastically.
    """
    return encode(decode_sum(payloads, n, scale, block), block, seed)


# ------------------------------------------------------------------------------------------- mathematical oracle


def _per_element_extremes(x: F32, block: int) -> tuple[F64, F64]:
    """Returns for each element the least and the greatest value of its block; NaN where the block is not finite."""
    lo, hi = np.full(x.size, np.nan), np.full(x.size, np.nan)
    for _, where in _blocks(x.size, block):
        v = x[where].astype(np.float64)
        if np.isfinite(v).all():
            lo[where], hi[where] = v.min(), v.max()
    return lo, hi


def ideal_decode(x: F32, block: int = 256) -> F64:
    """Returns what a 256-level min-max quantiser with exact arithmetic makes of `x`; NaN in blocks that are not finite.

    Args:
        x: One-dimensional vector.
        block: Elements that share one range.
    """
    lo, hi = _per_element_extremes(x, block)
    step = (hi - lo) / 255
    level = np.zeros_like(lo)
    np.divide(x - lo, step, out=level, where=step > 0)
    # hi itself, instead of lo + 255 * step, so that the ends of the range are exact.
    level = np.rint(level)
    return np.where(level == 255, hi, lo + level * step)


def rounding_bound(x: F32, block: int = 256) -> F64:
    """Returns the part of `error_bound` that is due to float32 arithmetic.

    With u = 2^-24 the relative error of one operation: encoding makes four (range, inverse, difference, product), each
    worth at most u * range after decoding; decoding makes three (range, step, product), likewise, and the last addition
    costs u * max(|lo|, |hi|). The absolute term is the grid of the subnormal numbers, four times as coarse where the
    power of two is 2^-2.
    """
    lo, hi = _per_element_extremes(x, block)
    largest = np.maximum(np.abs(lo), np.abs(hi))
    # All values of the block are equal: exact by promise.
    relative = 2.0**-24 * (7 * (hi - lo) + largest) * (1 + 2.0**-16) + 2.0**-147
    return np.where(hi == lo, 0.0, relative)


def error_bound(x: F32, block: int = 256, stochastic: bool = False) -> F64:
    """Returns for each element how far its decoded value may be from it; NaN in blocks that are not finite.

    Args:
        x: One-dimensional vector.
        block: Elements that share one range.
        stochastic: Bound for stochastic rounding, a whole step, instead of half a step.
    """
    lo, hi = _per_element_extremes(x, block)
    steps = 1 + 2.0**-16 if stochastic else 0.5
    return steps * (hi - lo) / 255 + rounding_bound(x, block)


# ------------------------------------------------------------------------------------------------- older formula


def bagua_formula(x: F32) -> F32:
    """Returns the level indices of BAGUA's min-max formula for one chunk, before the cast to uint8.

    The grid is anchored at 0 and there is no lower clamp, so an index can be outside 0 ... 255.
    """
    mn, mx = x.min(), x.max()
    s = LEVELS / (mx - mn + np.float32(1e-7))
    upper = np.rint(mx * s)
    index: F32 = np.minimum(np.rint(x * s), upper) - (upper - LEVELS)
    return index
