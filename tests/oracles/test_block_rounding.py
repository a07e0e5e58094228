"""The oracles of the block quantizers round as mathematics, and as the wire format promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.grids import folded, grid
from tests.oracles import block_quantizers as bq
from tests.oracles import block_rules
from tests.oracles.block_rules import Spec
from tests.oracles.block_specs import ALL, NEAREST, STOCHASTIC, deterministic, every, recode
from tests.oracles.vectors import (
    F32,
    F64,
    FLOAT32_MAX,
    FLOAT32_TINIEST,
    f32,
    make,
    raw_vectors,
    vectors,
)

stochastic = grid(cover=1, spec=STOCHASTIC)


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
    form = block_rules.FLOAT8[spec.format]
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


# Of two magnitudes a threshold within rounding of a value moves a whole side; their errors are compared in another test.
settled = grid(
    cover=1, spec=[pytest.param(spec, id=name) for name, spec in NEAREST.items() if spec.kind != "magnitudes"]
)


@settled
@given(x=vectors())
@deterministic
def test_against_mathematics(spec: Spec, x: F32) -> None:
    check_against_mathematics(spec, x)


@settled
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


@grid(cover=1, bits=[8, 4, 2])
@given(x=vectors())
@deterministic
def test_error_bound_of_minmax(bits: int, x: F32) -> None:
    """The bound that the page states."""
    spec = Spec("minmax", 64, bits=bits)
    error = np.abs(recode(spec, x).astype(np.float64) - x)
    assert np.all(error <= gap(spec, x) / 2 + rounding(spec, x))


@grid(cover=1, bits=[8, 4, 2])
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


@grid(
    cover=1,
    m__pre__unit=[
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
    assert block_rules.pre(f32(m)) == np.float32(pre)
    assert block_rules.unit(f32(m)) == np.float32(unit)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(Spec("fp8", 32), torch.float8_e4m3fn), (Spec("fp8", 32, format="e5m2"), torch.float8_e5m2)],
    ids=["e4m3", "e5m2"],
)
def test_fp8_against_torch(spec: Spec, dtype: torch.dtype) -> None:
    largest = block_rules.FLOAT8[spec.format].largest
    rng = np.random.default_rng(0)
    grid = (
        torch.arange(0, block_rules.FLOAT8[spec.format].largest_code + 1).to(torch.uint8).view(dtype).to(torch.float32)
    )
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
