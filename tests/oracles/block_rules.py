"""The rules of the block quantizers in NumPy: scales of blocks, codes of values, and back; see `block_quantizers`."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.oracles.minmax_uint8 import F32, U8, ZERO

BOOL = npt.NDArray[np.bool_]
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
        stochastic: Whether `minmax`, `absmax` and `fp8` round stochastically; `natural` always does, the others never.
        norm: Scale of `absmax`.
        means: Number of means of `sign`.
        format: Format of `fp8`.
        shared: Whether the scales of `absmax` come from outside, as in TernGrad.
    """

    kind: Literal["minmax", "absmax", "sign", "magnitudes", "natural", "fp8"]
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
        return {"sign": 1, "magnitudes": 2, "natural": 8, "fp8": 8}.get(self.kind, self.bits)


def pre(m: F32) -> F32:
    """Returns `pre(m)` of the page for each block; 1 for NaN."""
    factor = np.where(m >= np.float32(2.0**126), np.float32(2.0**-2), ONE)
    return np.where(m < np.float32(2.0**-60), np.float32(2.0**80), factor)


def exponent(m: F32) -> I64:
    field = (m.view(np.uint32) >> np.uint32(23)).astype(np.int64)
    return np.clip(field, 1, 253)


def power_of_two(exponent: I64) -> F32:
    """Returns powers of two that are normal float32 numbers."""
    return ((exponent + 127).astype(np.uint32) << np.uint32(23)).view(np.float32)


def unit(m: F32) -> F32:
    """Returns `unit(m)` of the page for each block."""
    return power_of_two(127 - exponent(m))


def tree(z: F32) -> F32:
    """Returns for each row its sum in the page's order. A row has a power of two of numbers."""
    while z.shape[1] > 1:
        half = z.shape[1] // 2
        z = z[:, :half] + z[:, half:]
    return z[:, 0]


def extremes(v: F32, present: BOOL) -> tuple[F32, F32]:
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


def inverse(top: int, span: F32) -> F32:
    return np.where(span > ZERO, np.float32(top) / span, ZERO)


def encode_minmax(spec: Spec, v: F32, present: BOOL, dithers: F32) -> tuple[F32, U8]:
    lo, hi = extremes(v, present)
    factor = pre(np.maximum(np.abs(lo), np.abs(hi)))
    low = lo * factor
    span = hi * factor - low
    inv = inverse(spec.top, span)
    t = (v * factor[:, None] - low[:, None]) * inv[:, None]
    if spec.stochastic:
        t = t + dithers
    q = np.clip(np.rint(t), ZERO, np.float32(spec.top))
    return np.stack((lo, hi), axis=1), q.astype(np.uint8)


def decode_minmax(spec: Spec, scales: F32, codes: U8) -> F32:
    lo, hi = scales[:, 0], scales[:, 1]
    factor = pre(np.maximum(np.abs(lo), np.abs(hi)))
    low, high = lo * factor, hi * factor
    step = (high - low) / np.float32(spec.top)
    w = low[:, None] + codes.astype(np.float32) * step[:, None]
    w = np.where(codes == spec.top, high[:, None], w)
    value: F32 = w * (ONE / factor)[:, None]
    return value


def l2_norm(v: F32, m: F32) -> F32:
    u = unit(m)
    y = v * u[:, None]
    root: F32 = np.sqrt(tree(y * y))
    norm: F32 = root / u
    return np.where(np.isinf(norm) & np.isfinite(m), np.finfo(np.float32).max, norm)


def encode_absmax(spec: Spec, v: F32, s: F32, dithers: F32) -> U8:
    factor = pre(s)
    inv = inverse(spec.top, s * factor)
    t = (v * factor[:, None]) * inv[:, None]
    if spec.stochastic:
        t = t + dithers
    q = np.clip(np.rint(t), np.float32(-spec.top), np.float32(spec.top))
    codes: U8 = (q.astype(np.int64) & ((1 << spec.bits) - 1)).astype(np.uint8)
    return codes


def decode_absmax(spec: Spec, scales: F32, codes: U8) -> F32:
    s = scales[:, 0]
    integers = codes.astype(np.int64)
    integers = np.where(integers >= 1 << (spec.bits - 1), integers - (1 << spec.bits), integers)
    top = np.float32(spec.top)
    inverse = ONE / top
    if top * inverse < ONE:
        inverse = np.nextafter(inverse, np.float32(2))
    value: F32 = (integers.astype(np.float32) * inverse) * s[:, None]
    return value


def encode_sign(spec: Spec, v: F32, m: F32, present: BOOL) -> tuple[F32, U8]:
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


def decode_sign(scales: F32, codes: U8) -> F32:
    return np.where(codes == 1, -scales[:, :1], scales[:, -1:])


def encode_natural(v: F32, m: F32, dithers: F32) -> tuple[F32, U8]:
    u = unit(m)
    y = np.abs(v) * u[:, None]
    bits = y.view(np.uint32).astype(np.int64)
    x, f = bits >> 23, bits & 0x7FFFFF
    uniform = dithers + HALF
    small = uniform < y * np.float32(2.0**125)
    up = uniform * np.float32(2.0**23) < f.astype(np.float32)
    d = np.where(x < 2, small.astype(np.int64), np.minimum(x - 1 + up, 127))
    return ONE / u, (d + np.where((v < ZERO) & (d > 0), 128, 0)).astype(np.uint8)


def decode_natural(scales: F32, codes: U8) -> F32:
    d = (codes & 0x7F).astype(np.int64)
    magnitude = power_of_two(d - 126) * scales[:, :1]
    return np.where(d == 0, ZERO, np.where(codes >= 128, -magnitude, magnitude))


def encode_fp8(spec: Spec, v: F32, s: F32, dithers: F32) -> U8:
    form = FLOAT8[spec.format]
    k, bias = form.mantissa, form.bias
    g = 23 - k
    factor = pre(s)
    inv = inverse(form.largest, s * factor)
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


def decode_fp8(spec: Spec, scales: F32, codes: U8) -> F32:
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
