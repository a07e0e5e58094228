"""Tests of the oracles of the block quantizers: against each other and against what the wire format promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import folded
from tests.oracles import block_quantizers as bq
from tests.oracles import minmax_uint8 as mm
from tests.oracles.block_quantizers import F64, Spec
from tests.oracles.vectors import (
    F32,
    FLOAT32_MAX,
    FLOAT32_TINIEST,
    KINDS,
    f32,
    make,
    raw_vectors,
    same_bits,
    vectors,
)
from tests.oracles.vectors import deterministic as thorough

deterministic = settings(thorough, max_examples=50)

NEAREST = {
    "minmax8": Spec("minmax", 256),
    "minmax4": Spec("minmax", 64, bits=4),
    "minmax2": Spec("minmax", 32, bits=2),
    "absmax8": Spec("absmax", 256),
    "absmax4": Spec("absmax", 128, bits=4),
    "absmax2": Spec("absmax", 32, bits=2),
    "sign": Spec("sign", 64),
    "sign_two": Spec("sign", 64, means=2),
    "e4m3": Spec("fp8", 128),
    "e5m2": Spec("fp8", 32, format="e5m2"),
}
STOCHASTIC = {
    **{f"{name}_stochastic": replace(spec, stochastic=True) for name, spec in NEAREST.items() if spec.kind != "sign"},
    "natural": Spec("natural", 64),
    "qsgd_l2": Spec("absmax", 128, bits=4, stochastic=True, norm="l2"),
    "qsgd_5": Spec("absmax", 128, levels=5, bits=4, stochastic=True),
    "terngrad": Spec("absmax", 512, bits=2, stochastic=True),
}
ALL = {**NEAREST, **STOCHASTIC}
SHARED = Spec("absmax", 32, levels=1, bits=8, stochastic=True, shared=True)

nearest = pytest.mark.parametrize("spec", NEAREST.values(), ids=NEAREST.keys())
stochastic = pytest.mark.parametrize("spec", STOCHASTIC.values(), ids=STOCHASTIC.keys())
every = pytest.mark.parametrize("spec", ALL.values(), ids=ALL.keys())


def recode(spec: Spec, x: F32, seed: int = 0) -> F32:
    return bq.decode(spec, bq.encode(spec, x, seed), x.size)


def per_block(spec: Spec, x: F32) -> tuple[F64, F64, F64]:
    """Returns for each element the least, the greatest value and the greatest magnitude of its block."""
    lo, hi = np.empty(x.size), np.empty(x.size)
    for start in range(0, x.size, spec.block):
        where = slice(start, start + spec.block)
        lo[where], hi[where] = x[where].min(), x[where].max()
    return lo, hi, np.maximum(np.abs(lo), np.abs(hi))


def gap(spec: Spec, x: F32) -> F64:
    """Returns for each element at least the distance of the grid points around it."""
    lo, hi, m = per_block(spec, x)
    if spec.kind == "minmax":
        return (hi - lo) / spec.top
    if spec.kind == "absmax":
        scale = m
        if spec.norm == "l2":
            scale = np.concatenate(
                [
                    np.full(part.size, np.linalg.norm(part))
                    for part in np.split(x.astype(np.float64), range(spec.block, x.size, spec.block))
                ]
            )
        return scale / spec.top
    size = np.abs(x).astype(np.float64)
    if spec.kind == "natural":
        return np.maximum(size, m * 2.0**-124)
    form = bq.FLOAT8[spec.format]
    return np.maximum(size * 2.0**-form.mantissa, m / form.largest * 2.0 ** (1 - form.bias - form.mantissa))


def rounding(spec: Spec, x: F32) -> F64:
    """Returns how much float32 arithmetic may add to an error."""
    lo, hi, m = per_block(spec, x)
    if spec.kind == "minmax":
        # The allowance of the page.
        return (2.0**-24 * (7 * (hi - lo) + m)) * (1 + 2.0**-16) + 2.0**-147
    return 2.0**-24 * 10 * m + 2.0**-147


def check_against_mathematics(spec: Spec, x: F32) -> None:
    y = recode(spec, x).astype(np.float64)
    ideal = bq.ideal(spec, x)
    allowed = rounding(spec, x)
    same = np.abs(y - ideal) <= allowed
    # Elsewhere the value is a tie up to rounding, and the other neighbour was taken.
    tie = np.abs(np.abs(y - x) - np.abs(ideal - x)) <= 2 * allowed
    assert np.all(same | (tie & (spec.kind != "sign")))


# ------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("spec", "n", "size"),
    [
        (Spec("minmax", 256), 257, 16 + 272),
        (Spec("minmax", 256, bits=4), 257, 16 + 256),
        (Spec("minmax", 32, bits=2), 65, 32 + 32),
        (Spec("absmax", 256), 17, 16 + 32),
        (Spec("absmax", 128, bits=4), 641, 32 + 384),
        (Spec("absmax", 512, bits=2), 1, 16 + 128),
        (Spec("sign", 32), 1, 16 + 16),
        (Spec("sign", 32), 129, 32 + 32),
        (Spec("sign", 32, means=2), 129, 48 + 32),
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


@pytest.mark.parametrize(
    ("spec", "x", "expected"),
    [
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


# ----------------------------------------------------------------------------------------------- special values


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


# --------------------------------------------------------------------------------------------------- arithmetic


@nearest
@given(x=vectors())
@deterministic
def test_against_mathematics(spec: Spec, x: F32) -> None:
    check_against_mathematics(spec, x)


@nearest
@given(x=raw_vectors(allow_nonfinite=False))
@deterministic
def test_against_mathematics_raw(spec: Spec, x: F32) -> None:
    check_against_mathematics(spec, x)


@stochastic
@given(x=vectors())
@deterministic
def test_stochastic_takes_a_neighbour(spec: Spec, x: F32) -> None:
    error = np.abs(recode(spec, x, seed=x.size).astype(np.float64) - x)
    if spec.kind == "natural":
        # Greater values become 2^127, see test_natural_saturates.
        error = np.where(np.abs(x) <= 2.0**127, error, 0)
    if spec.norm == "l2":
        # Blocks whose norm overflows.
        error = np.where(gap(spec, x) * spec.top < FLOAT32_MAX, error, 0)
    assert np.all(error <= gap(spec, x) * (1 + 2.0**-14) + rounding(spec, x))


@pytest.mark.parametrize("bits", [8, 4, 2])
@given(x=vectors())
@deterministic
def test_error_bound_of_minmax(bits: int, x: F32) -> None:
    """The bound that the page states."""
    spec = Spec("minmax", 64, bits=bits)
    error = np.abs(recode(spec, x).astype(np.float64) - x)
    assert np.all(error <= gap(spec, x) / 2 + rounding(spec, x))


@pytest.mark.parametrize("bits", [8, 4, 2])
@given(x=vectors())
@deterministic
def test_encoding_a_decoded_vector(bits: int, x: F32) -> None:
    """Gives the same payload where no number is subnormal or a negative zero."""
    spec = Spec("minmax", 64, bits=bits)
    lo, hi, m = per_block(spec, x)
    x = x[(m >= 2.0**-100) & (m < 2.0**126)] + np.float32(0)
    payload = bq.encode(spec, x)
    again = bq.encode(spec, bq.decode(spec, payload, x.size))
    assert np.array_equal(payload, again)


@pytest.mark.parametrize(
    "values",
    [
        [-0.0, -0.0],
        [-0.0, 1.0],
        [0x6CE3EC * FLOAT32_TINIEST, 0x6CE3ED * FLOAT32_TINIEST, 0x6CE3F0 * FLOAT32_TINIEST],
        [FLOAT32_TINIEST, 3e38],
    ],
)
def test_encoding_a_decoded_vector_again_gives_another_payload(values: list[float]) -> None:
    """Exceptions to the page: negative zeros, and subnormal numbers, which decoding rounds twice."""
    spec = Spec("minmax", 32, bits=2)
    payload = bq.encode(spec, f32(*values))
    again = bq.encode(spec, bq.decode(spec, payload, len(values)))
    assert not np.array_equal(payload, again)


@pytest.mark.parametrize(
    ("spec", "value", "seed", "index"),
    [
        (Spec("absmax", 32, stochastic=True), 0.7, 28, 2896),
        (Spec("absmax", 32, stochastic=True), -0.7, 60, 1990),
        (Spec("minmax", 32, stochastic=True), 0.7, 28, 2896),
    ],
)
def test_stochastic_rounding_may_miss_the_greatest_value(spec: Spec, value: float, seed: int, index: int) -> None:
    """An exception to the page: `fl(L + dither)` can be `L - 0.5`, which is rounded to the even `L - 1`."""
    x = np.full(4096, value, dtype=np.float32)
    if spec.kind == "minmax":
        x[::32] = 0
    y = recode(spec, x, seed)
    assert np.flatnonzero(x != y).tolist() == [index]
    assert y[index] == pytest.approx(value * (spec.top - 1) / spec.top, rel=1e-6)


def test_end_beside_the_float32_maximum() -> None:
    """`2^-2` also rounds normal numbers below 2^-124, not only subnormal ones."""
    least = np.float32(2.0**-126 + 2.0**-149)
    y = recode(Spec("minmax", 32), f32(float(least), 3e38))
    assert y[0] == np.float32(2.0**-126) != least


@every
@folded(exponent=[-100, -62, -60, -30, 1, 60, 122])
def test_powers_of_two_do_not_change_codes(spec: Spec, exponent: int) -> None:
    x = make("gaussian", 1000, 1.0, 4)
    offset = bq.codes_offset(spec, x.size)
    scaled = x * np.float32(2.0**exponent)
    payload, other = bq.encode(spec, x, 8), bq.encode(spec, scaled, 8)
    assert np.array_equal(payload[offset:], other[offset:])
    assert np.array_equal(bq.decode(spec, payload, 1000) * np.float32(2.0**exponent), bq.decode(spec, other, 1000))


@given(x=raw_vectors(allow_nonfinite=False), width=st.sampled_from([1, 2, 32, 4096]))
@deterministic
def test_tree_against_fsum(x: F32, width: int) -> None:
    x = x * np.float32(2.0**-13)
    row = np.zeros((1, width), dtype=np.float32)
    row[0, : min(width, x.size)] = x[:width]
    exact = math.fsum(row[0].tolist())
    # One rounding for each of the log2(width) additions on a number's way.
    bound = math.log2(width) * 2.0**-24 * 1.001 * math.fsum(np.abs(row[0]).tolist())
    assert abs(float(bq.tree(row)[0]) - exact) <= bound


def test_tree_order() -> None:
    """Halves are added first: 2^24 + 1 - 2^24 + 0 is 0 in another order."""
    big = 2.0**24
    assert bq.tree(f32(big, 1, -big, 0).reshape(1, 4))[0] == 1
    assert bq.tree(f32(big, -big, 1, 0).reshape(1, 4))[0] == 0


@stochastic
def test_unbiased(spec: Spec) -> None:
    """The mean over seeds is the vector."""
    x = make("gaussian", 300, 1.0, 6)
    repeats = 400
    total = np.zeros(x.size)
    for seed in range(repeats):
        total += recode(spec, x, seed)
    width = gap(spec, x)
    error = (total / repeats - x) / width
    # A draw from two points one gap apart has at most half a gap of deviation.
    assert np.abs(error).max() < 5 * 0.5 / math.sqrt(repeats)
    assert abs(error.mean()) < 4 * 0.5 / math.sqrt(repeats * x.size)


def test_natural_is_unbiased_below_its_least_power() -> None:
    """Values below `2^-125 * p` become that or 0."""
    x = np.full(4096, 1.5 * 2.0**-126, dtype=np.float32)
    x[::64] = 1
    small = recode(ALL["natural"], x, 11)[x != 1]
    assert set(np.unique(small).tolist()) == {0.0, 2.0**-125}
    assert small.astype(np.float64).mean() * 2.0**126 == pytest.approx(1.5, abs=0.06)


@pytest.mark.parametrize(
    ("m", "pre", "unit"),
    [
        (0.0, 2.0**80, 2.0**126),
        (FLOAT32_TINIEST, 2.0**80, 2.0**126),
        (2.0**-126, 2.0**80, 2.0**126),
        (2.0**-125, 2.0**80, 2.0**125),
        (np.nextafter(np.float32(2.0**-60), np.float32(0)), 2.0**80, 2.0**61),
        (2.0**-60, 1.0, 2.0**60),
        (1.0, 1.0, 1.0),
        (np.nextafter(np.float32(2.0**126), np.float32(0)), 1.0, 2.0**-125),
        (2.0**126, 2.0**-2, 2.0**-126),
        (2.0**127, 2.0**-2, 2.0**-126),
        (FLOAT32_MAX, 2.0**-2, 2.0**-126),
    ],
)
def test_powers_of_two(m: float, pre: float, unit: float) -> None:
    assert bq.pre(f32(m)) == np.float32(pre)
    assert bq.unit(f32(m)) == np.float32(unit)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(Spec("fp8", 32), torch.float8_e4m3fn), (Spec("fp8", 32, format="e5m2"), torch.float8_e5m2)],
    ids=["e4m3", "e5m2"],
)
def test_fp8_against_torch(spec: Spec, dtype: torch.dtype) -> None:
    largest = bq.FLOAT8[spec.format].largest
    rng = np.random.default_rng(0)
    grid = torch.arange(0, bq.FLOAT8[spec.format].largest_code + 1).to(torch.uint8).view(dtype).to(torch.float32)
    ties = ((grid[1:] + grid[:-1]) / 2).numpy()
    x = np.concatenate(
        [
            rng.uniform(-largest, largest, 5000),
            np.exp2(rng.uniform(-20, math.log2(largest), 5000)) * rng.choice([-1, 1], 5000),
            *[np.nextafter(t, np.float32(d)) for t in (ties, -ties) for d in (-np.inf, np.inf)],
            ties,
            -ties,
        ]
    ).astype(np.float32)
    x = x[: x.size // 31 * 31].reshape(-1, 31)
    x = np.concatenate([np.full((len(x), 1), largest, dtype=np.float32), x], axis=1).ravel()
    payload = bq.encode(spec, x)
    codes = payload[bq.codes_offset(spec, x.size) :][: x.size]
    theirs = torch.from_numpy(x).to(dtype)
    expected = theirs.view(torch.uint8).numpy()
    # The page has no negative zero.
    assert np.array_equal(codes, np.where(expected == 0x80, 0, expected))
    assert np.array_equal(bq.decode(spec, payload, x.size), theirs.to(torch.float32).numpy())


# ------------------------------------------------------------------------- shared scales, reduction and feedback


def test_shared_scales_add_up_as_bytes() -> None:
    ranks, n = 127, 70
    vectors_ = [make("gaussian", n, 1.0, rank) for rank in range(ranks)]
    scales = np.array([max(np.abs(v[s : s + 32]).max() for v in vectors_) for s in (0, 32, 64)], dtype=np.float32)
    payloads = [bq.encode(SHARED, v, seed, scales) for seed, v in enumerate(vectors_)]
    total = payloads[0].copy()
    offset = bq.codes_offset(SHARED, n)
    for payload in payloads[1:]:
        assert np.array_equal(payload[:offset], total[:offset])
        total[offset:] += payload[offset:]
    exact = sum(bq.decode(SHARED, payload, n).astype(np.float64) for payload in payloads)
    assert np.array_equal(bq.decode(SHARED, total, n), np.asarray(exact).astype(np.float32))


def test_shared_sum_may_round_unlike_the_sum_of_vectors() -> None:
    """An exception to the page: adding codes rounds once, adding decoded vectors each time."""
    n, scales = 32, f32(0.7)
    x = np.full(n, 0.7, dtype=np.float32)
    payload = bq.encode(SHARED, x, 0, scales)
    differing = []
    for ranks in range(1, 128):
        total = payload.copy()
        total[16:] *= np.uint8(ranks)
        one_by_one = bq.decode_sum(SHARED, np.stack([payload] * ranks), n, 1.0)
        differing += [] if np.array_equal(bq.decode(SHARED, total, n), one_by_one) else [ranks]
    assert differing[:3] == [7, 8, 9]


def test_shared_scales_are_required_and_only_there() -> None:
    with pytest.raises(ValueError, match="shared"):
        bq.encode(SHARED, f32(1))
    with pytest.raises(ValueError, match="shared"):
        bq.encode(NEAREST["absmax8"], f32(1), scales=f32(1))


@every
def test_reduce(spec: Spec) -> None:
    """Adds in the order of the ranks and encodes the result."""
    x = np.stack([make("heavy", 200, 1.0, rank) for rank in range(5)])
    payloads = np.stack([bq.encode(spec, v, rank) for rank, v in enumerate(x)])
    total = np.zeros(200, dtype=np.float32)
    for payload in payloads:
        total += bq.decode(spec, payload, 200)
    expected = total * np.float32(0.2)
    assert same_bits(bq.decode_sum(spec, payloads, 200, 0.2), expected)
    assert np.array_equal(bq.reduce(spec, payloads, 200, 0.2, 77), bq.encode(spec, expected, 77))


def test_sum_that_overflows() -> None:
    spec = NEAREST["absmax8"]
    payloads = np.stack([bq.encode(spec, f32(3e38, 1))] * 2)
    assert bq.decode_sum(spec, payloads, 2, 0.5)[0] == np.inf
    assert np.isnan(bq.decode(spec, bq.reduce(spec, payloads, 2, 0.5), 2)).all()


@nearest
def test_feedback_loses_nothing(spec: Spec) -> None:
    """What was sent and what is left make up what came in."""
    residual = np.zeros(300, dtype=np.float32)
    sent, given_ = np.zeros(300), np.zeros(300)
    for step in range(20):
        x = make("gaussian", 300, 1.0, step)
        payload, residual = bq.feedback(spec, x, residual, 1.0, step)
        sent += bq.decode(spec, payload, 300)
        given_ += x
    np.testing.assert_allclose(sent + residual, given_, atol=1e-4)


def test_feedback_keeps_the_old_residual_where_the_new_one_is_not_finite() -> None:
    spec = NEAREST["absmax2"]
    x, residual = np.ones(40, dtype=np.float32), np.full(40, 0.25, dtype=np.float32)
    x[3] = np.nan
    x[32:] = 1.0
    x[33] = 0.5
    _, left = bq.feedback(spec, x, residual, 1.0)
    assert np.all(left[:32] == 0.25)
    assert left[33] == -0.5
    assert not np.delete(left[32:], 1).any()


def test_feedback_factor() -> None:
    """The factor is in the payload, not in the sum."""
    spec = NEAREST["absmax8"]
    payload, left = bq.feedback(spec, f32(1, 1), f32(1, 1), 0.5)
    assert np.array_equal(payload, bq.encode(spec, f32(1, 1)))
    assert np.array_equal(left, f32(1, 1))
