"""The oracles of the block quantizers: sizes, bytes, and values at the edge of the floats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grids import folded, grid
from tests.oracles import block_quantizers as bq
from tests.oracles import minmax_uint8 as mm
from tests.oracles.block_rules import Spec
from tests.oracles.block_specs import ALL, STOCHASTIC, deterministic, every, nearest, recode
from tests.oracles.vectors import (
    F32,
    FLOAT32_MAX,
    FLOAT32_TINIEST,
    KINDS,
    f32,
    make,
    raw_vectors,
    same_bits,
)


@grid(
    cover=1,
    spec__n__size=[
        (Spec("minmax", 256), 257, 16 + 272),
        (Spec("minmax", 256, bits=4), 257, 16 + 256),
        (Spec("minmax", 32, bits=2), 65, 32 + 32),
        (Spec("absmax", 256), 17, 16 + 32),
        (Spec("absmax", 128, bits=4), 641, 32 + 384),
        (Spec("absmax", 512, bits=2), 1, 16 + 128),
        (Spec("sign", 32), 1, 16 + 16),
        (Spec("sign", 32), 129, 32 + 32),
        (Spec("sign", 32, means=2), 129, 48 + 32),
        (Spec("magnitudes", 256), 257, 16 + 128),
        (Spec("natural", 4096), 4097, 16 + 4112),
        (Spec("fp8", 32), 160, 32 + 160),
    ],
)
def test_payload_size(spec: Spec, n: int, size: int) -> None:
    assert bq.payload_size(spec, n) == size
    assert bq.encode(spec, np.ones(n, dtype=np.float32)).shape == (size,)


@every
def test_empty_vector(spec: Spec) -> None:
    assert bq.encode(spec, f32()).size == 0
    assert recode(spec, f32()).shape == (0,)
    left = bq.feedback(spec, f32(), f32(), 1.0)
    assert left[0].size == left[1].size == 0


@grid(
    cover=1,
    spec__x__expected=[
        (
            Spec("minmax", 32, bits=2),
            f32(0, 1, 2, 3, 1, 0, 0, 0, 3, 2),
            "00000000 00004040 00000000 00000000 0c090203 01000000 00000000 00000000",
        ),
        (
            Spec("minmax", 32, bits=4),
            f32(-1, 14, 4),
            "000080bf 00006041 00000000 00000000 000f0500 00000000 00000000 00000000",
        ),
        (
            Spec("absmax", 32, bits=4),
            f32(-7, 7, *[0] * 14, -1, 3),
            "0000e040 00000000 00000000 00000000 f9370000 00000000 00000000 00000000",
        ),
        (
            Spec("absmax", 32),
            f32(-127, 127, -1, 0, 2),
            "0000fe42 00000000 00000000 00000000 817fff00 02000000 00000000 00000000",
        ),
        (
            Spec("absmax", 32, bits=2, stochastic=True),
            f32(1, -1, 0, *[0] * 5, -1, -1, 1),
            "0000803f 00000000 00000000 00000000 0d0f0400 00000000 00000000 00000000",
        ),
        (
            Spec("sign", 32),
            f32(-1, 1, 1, 1, 1, -1, *[1] * 25, -1),
            "0000803f 00000000 00000000 00000000 01020080 00000000 00000000 00000000",
        ),
        (
            Spec("sign", 32, means=2),
            f32(-1, 2, 4, -3, -0.0),
            "00000040 00000040 00000000 00000000 01000001 00000000 00000000 00000000",
        ),
        (
            Spec("magnitudes", 32),
            f32(-1, 6, 3, -8, *[0] * 4, -0.0, 9, 2),
            "403ff540 00000000 00000000 00000000 02050003 00000000 00000000 00000000",
        ),
        (
            Spec("natural", 32),
            f32(1, -0.5, 0, 2**-10, -0.0),
            "0000803f 00000000 00000000 00000000 7efd0074 00000000 00000000 00000000",
        ),
        (
            Spec("fp8", 32),
            f32(448, -448, 1, -(2**-9), 0, -0.0, 2**-10),
            "0000e043 00000000 00000000 00000000 7efe3881 00000000 00000000 00000000",
        ),
        (
            Spec("fp8", 32, format="e5m2"),
            f32(57344, -1, 2**-16, 2**-17),
            "00006047 00000000 00000000 00000000 7bbc0100 00000000 00000000 00000000",
        ),
    ],
)
def test_bytes(spec: Spec, x: F32, expected: str) -> None:
    """Payloads worked out by hand."""
    payload = bq.encode(spec, x, seed=1)
    assert payload.tobytes().hex() == expected.replace(" ", "")


@every
@given(n=st.integers(1, 300))
@deterministic
def test_pad_bytes_are_zero(spec: Spec, n: int) -> None:
    payload = bq.encode(spec, np.linspace(-2, -1, n, dtype=np.float32), seed=n)
    blocks = -(-n // spec.block)
    assert not payload[4 * spec.words * blocks : bq.codes_offset(spec, n)].any()
    codes = payload[bq.codes_offset(spec, n) :]
    if spec.code_bits == 8:
        assert not codes[n:].any()
        return
    width = spec.block * spec.code_bits // 8
    assert not codes[blocks * width :].any()
    for element in range(n, blocks * spec.block):
        block, i = divmod(element, spec.block)
        shift = spec.code_bits * (i // width)
        assert (int(codes[block * width + i % width]) >> shift) % (1 << spec.code_bits) == 0


@every
@given(data=st.data(), n=st.integers(0, 100))
@deterministic
def test_any_bytes_decode(spec: Spec, data: st.DataObject, n: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    payload = rng.integers(0, 256, bq.payload_size(spec, n)).astype(np.uint8)
    y = bq.decode(spec, payload, n)
    assert y.dtype == np.float32
    assert y.shape == (n,)


@folded(rounding_seed=[None, 5], kind=KINDS)
def test_agrees_with_the_older_oracle(kind: str, rounding_seed: int | None) -> None:
    spec = Spec("minmax", 64, stochastic=rounding_seed is not None)
    for scale in (1e-38, 1e-20, 1.0, 3e38):
        x = make(kind, 1000, scale, 3)
        payload = bq.encode(spec, x, rounding_seed or 0)
        assert np.array_equal(payload, mm.encode(x, 64, rounding_seed))
        assert same_bits(bq.decode(spec, payload, 1000), mm.decode(payload, 1000, 64))


@every
@folded(bad=[np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite(spec: Spec, bad: float) -> None:
    """A block with one has the canonical NaN and no codes; its neighbours do not notice."""
    x = make("gaussian", 3 * spec.block, 1.0, 0)
    broken = x.copy()
    broken[spec.block + 3] = bad
    payload, clean = bq.encode(spec, broken, 9), bq.encode(spec, x, 9)
    scales = bq.block_scales(spec, payload, x.size).view(np.uint32)
    assert np.all(scales[1] == mm.NAN_BITS)
    width = spec.block * spec.code_bits // 8
    start = bq.codes_offset(spec, x.size) + width
    assert not payload[start : start + width].any()

    y, expected = bq.decode(spec, payload, x.size), bq.decode(spec, clean, x.size)
    middle = slice(spec.block, 2 * spec.block)
    assert np.isnan(y[middle]).all()
    assert same_bits(np.delete(y, middle), np.delete(expected, middle))


@every
@folded(zero=[0.0, -0.0])
def test_zeros(spec: Spec, zero: float) -> None:
    """Zeros decode to zeros, positive ones but where a mean of negative zeros is -0."""
    y = recode(spec, np.full(spec.block + 5, zero, dtype=np.float32), seed=3)
    assert not y.any()
    assert not np.signbit(y[-5:]).any()
    assert np.signbit(y[: spec.block]).all() == (spec.means == 2 and math.copysign(1, zero) < 0)


@nearest
@folded(
    n=[1, 5, 31, 32, 100, 256],
    value=[1.0, 0.7, -3.3, FLOAT32_MAX, -FLOAT32_MAX, FLOAT32_TINIEST, -3 * FLOAT32_TINIEST, 1e-38],
)
def test_equal_values(spec: Spec, n: int, value: float) -> None:
    """Exact, but for the rounding of a mean."""
    x = np.full(n, value, dtype=np.float32)
    y = recode(spec, x)
    if spec.kind == "sign":
        np.testing.assert_allclose(y, x, rtol=2.0**-21, atol=0)
    elif spec.kind == "magnitudes":
        # The greatest bfloat16 is 2^-8 below the greatest float32; the least is 2^-133.
        np.testing.assert_allclose(y, x, rtol=2.0**-8, atol=2.0**-134)
    else:
        assert same_bits(y, x)


@every
@folded(value=[1.5, -1.0, 1e-44, -1e38])
def test_one_hot(spec: Spec, value: float) -> None:
    """All others stay zero, except with one mean of magnitudes."""
    x = np.zeros(spec.block, dtype=np.float32)
    x[7] = value
    y = recode(spec, x, seed=2)
    if spec.kind == "natural":
        assert np.float32(abs(value)) / 2 <= abs(y[7]) <= 2 * np.float32(abs(value))
        assert np.sign(y[7]) == np.sign(value)
    elif spec.kind == "magnitudes":
        np.testing.assert_allclose(y[7], x[7], rtol=2.0**-8, atol=2.0**-134)
    elif spec.kind != "sign":
        assert y[7] == x[7]
    if not (spec.kind == "sign" and (spec.means == 1 or value > 0)):
        assert not np.delete(y, 7).any()


@every
@given(x=raw_vectors(allow_nonfinite=False))
@deterministic
def test_finite_stays_finite(spec: Spec, x: F32) -> None:
    if spec.norm == "l2":
        x = x * np.float32(2.0**-4)
    assert np.isfinite(recode(spec, x, seed=x.size)).all()


@pytest.mark.parametrize("means", [1, 2])
def test_means_of_the_greatest_float_do_not_overflow(means: int) -> None:
    for block in (32, 256, 4096):
        for n in range(1, block + 1, 1 + block // 300):
            x = np.full(n, -FLOAT32_MAX, dtype=np.float32)
            assert np.isfinite(recode(Spec("sign", block, means=means), x)).all()


def test_natural_saturates() -> None:
    x = f32(FLOAT32_MAX, -FLOAT32_MAX, 2.0**127, 2.0**126)
    assert np.array_equal(recode(ALL["natural"], x, 4), f32(2.0**127, -(2.0**127), 2.0**127, 2.0**126))


def test_norm_that_overflows() -> None:
    """Finite values whose Euclidean norm is beyond float32 get the greatest float32 for a scale."""
    spec = STOCHASTIC["qsgd_l2"]
    payload = bq.encode(spec, f32(3e38, 3e38))
    assert bq.block_scales(spec, payload, 2)[0, 0] == np.finfo(np.float32).max
    assert np.isfinite(bq.decode(spec, payload, 2)).all()
    assert recode(spec, f32(3e38))[0] == np.float32(3e38)
