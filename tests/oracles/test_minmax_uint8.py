"""Tests of the MinMaxUInt8 oracles: each against the other, and against what the wire format promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grids import folded, grid
from tests.oracles import minmax_uint8 as mm
from tests.oracles.vectors import (
    BLOCKS,
    F32,
    FLOAT32_MAX,
    FLOAT32_TINIEST,
    KINDS,
    deterministic,
    f32,
    make,
    raw_vectors,
    same_bits,
    vectors,
)


def check_against_mathematics(x: F32, block: int) -> None:
    """Compares the bit-exact oracle with the mathematical one."""
    decoded = mm.decode(mm.encode(x, block), x.size, block)
    error = np.abs(decoded.astype(np.float64) - x)
    assert np.all(error <= mm.error_bound(x, block))

    # Either both oracles chose the same level, or the value is a tie up to rounding.
    rounding = mm.rounding_bound(x, block)
    half_step = mm.error_bound(x, block) - rounding
    same_level = np.abs(decoded - mm.ideal_decode(x, block)) <= rounding
    assert np.all(same_level | (np.abs(error - half_step) <= rounding))

    stochastic = mm.decode(mm.encode(x, block, seed=x.size), x.size, block)
    assert np.all(np.abs(stochastic.astype(np.float64) - x) <= mm.error_bound(x, block, stochastic=True))

    for start in range(0, x.size, block):
        lo, hi = float(x[start : start + block].min()), float(x[start : start + block].max())
        # 2^-2 rounds subnormal ends, see test_subnormal_end_beside_the_float32_maximum.
        slack = 2.0**-147 if max(abs(lo), abs(hi)) >= 2.0**126 else 0.0
        for y in (decoded[start : start + block], stochastic[start : start + block]):
            assert float(y.min()) >= lo - slack
            assert float(y.max()) <= hi + slack


@grid(
    cover=1,
    n__block__size=[
        (0, 256, 0),
        (1, 256, 32),
        (16, 256, 32),
        (17, 256, 48),
        (256, 256, 272),
        (257, 256, 288),
        (4096, 256, 4224),
        (1000, 32, 256 + 1008),
        (8192, 4096, 16 + 8192),
        (65, 32, 32 + 80),
    ],
)
def test_payload_size(n: int, block: int, size: int) -> None:
    """The layout rounds both parts up to 16 bytes."""
    assert mm.payload_size(n, block) == size
    assert mm.encode(np.ones(n, dtype=np.float32), block).shape == (size,)


@pytest.mark.parametrize("block", [0, 16, 48, 8192, -256])
def test_block_must_be_a_power_of_two_in_range(block: int) -> None:
    """Blocks that the page does not allow are refused."""
    with pytest.raises(ValueError, match="power of two"):
        mm.payload_size(1, block)


def test_golden_payload_nearest() -> None:
    """Bytes of a small payload, so that the format cannot drift."""
    x = f32(-1.0, 0.5, 0.25, 3.0, 0.0, -0.125, 2.75)
    payload = mm.encode(x, 32)
    assert payload.tobytes().hex() == (
        "000080bf000040400000000000000000"  # lo = -1, hi = 3, padding
        "006050ff4038ef000000000000000000"
    )
    assert mm.decode(payload, 7, 32).astype("<f4").tobytes().hex() == (
        "000080bf" + "8481013f" + "8482823e" + "00004040" + "0081803b" + "f0f8f8bd" + "f1ef2f40"
    )


def test_golden_payload_stochastic() -> None:
    """Bytes of a stochastically rounded payload of two blocks, the second one short."""
    x = (np.arange(40, dtype=np.float32) - 13) / np.float32(8)
    payload = mm.encode(x, 32, seed=0x0123456789ABCDEF)
    assert payload.tobytes().hex() == (
        "0000d0bf000010400000184000005040"  # lo and hi of both blocks
        "0008111821293139424a525a636a737b838c949ca4adb5bdc5cdd6dfe7eff7ff"
        "0024496d92b6dbff0000000000000000"  # second block and padding
    )
    assert same_bits(mm.encode(x, 32, seed=0x0123456789ABCDEF - 2**64).view(np.float32), payload.view(np.float32))


@deterministic
@given(vectors(), st.sampled_from(BLOCKS))
def test_agrees_with_mathematics(x: F32, block: int) -> None:
    """Error, level and range, for vectors of all kinds and scales."""
    check_against_mathematics(x, block)


@deterministic
@given(raw_vectors(allow_nonfinite=False))
def test_agrees_with_mathematics_on_arbitrary_values(x: F32) -> None:
    """Error, level and range, for whatever finite values hypothesis finds."""
    check_against_mathematics(x, 32)


@folded(towards=[-1.0, 0.0, 1.0], threshold=[2.0**126, 2.0**-60, 2.0**-126, 2.0**-149, FLOAT32_MAX])
def test_agrees_with_mathematics_at_the_changes_of_scale(threshold: float, towards: float) -> None:
    """The largest magnitude is at or beside a value where the power of two changes."""
    largest = np.float32(threshold) if towards == 0 else np.nextafter(np.float32(threshold), np.float32(towards))
    largest = min(largest, np.float32(FLOAT32_MAX))
    for lo in (-1.0, -0.3, 0.0, 0.999999):
        check_against_mathematics((np.linspace(lo, 1, 300) * float(largest)).astype(np.float32), 64)
        check_against_mathematics((np.linspace(-1, -lo, 300) * float(largest)).astype(np.float32), 4096)


def test_subnormal_end_beside_the_float32_maximum() -> None:
    """The one case that leaves `[lo, hi]`: multiplying by 2^-2 rounds a subnormal end, by at most two grid points."""
    for low in range(1, 16):
        for x in (f32(low * FLOAT32_TINIEST, 2.0**127), f32(-(2.0**127), low * FLOAT32_TINIEST)):
            decoded = mm.decode(mm.encode(x, 32), 2, 32).astype(np.float64)
            assert decoded.min() >= x.min() - 2 * FLOAT32_TINIEST
            assert decoded.max() <= x.max() + 2 * FLOAT32_TINIEST
    # This is also the only place where the threshold itself, 2^126, shows.
    below = float(np.nextafter(np.float32(2.0**126), np.float32(0)))
    assert mm.decode(mm.encode(f32(FLOAT32_TINIEST, 2.0**126), 32), 2, 32)[0] == 0
    assert mm.decode(mm.encode(f32(FLOAT32_TINIEST, below), 32), 2, 32)[0] == np.float32(FLOAT32_TINIEST)


@deterministic
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 300), st.none() | st.integers(0, 99))
def test_constants_are_exact(value: float, n: int, seed: int | None) -> None:
    """A block of equal values comes back; one of -0 comes back as +0."""
    x = np.full(n, value, dtype=np.float32)
    assert same_bits(mm.decode(mm.encode(x, 64, seed), n, 64), x + np.float32(0))


@pytest.mark.parametrize("seed", [None, 5])
def test_one_hot_zeros_stay_zero(seed: int | None) -> None:
    """Zeros stay zero as the lower end of the range, and up to float32 rounding as the upper end."""
    for value in (1.0, -1.0, 1e-40, -3e38):
        x = np.zeros(256, dtype=np.float32)
        x[77] = value
        decoded = mm.decode(mm.encode(x, 256, seed), 256, 256)
        error = np.abs(decoded.astype(np.float64) - x)
        assert np.all(error <= mm.rounding_bound(x, 256))
        assert value < 0 or np.count_nonzero(decoded) == 1


def test_signed_zeros() -> None:
    """-0 is below +0 in the scales, and zeros decode to zeros."""
    for x, lo, hi in (
        (f32(0.0, -0.0), -0.0, 0.0),
        (f32(-0.0, 0.0), -0.0, 0.0),
        (f32(-0.0, -0.0), -0.0, -0.0),
        (f32(0.0, 0.0), 0.0, 0.0),
        (f32(-1.0, -0.0), -1.0, -0.0),
        (f32(-1.0, -0.0, 0.0), -1.0, 0.0),
        (f32(0.0, -0.0, 1.0), -0.0, 1.0),
    ):
        payload = mm.encode(x, 32)
        assert same_bits(payload[:8].copy().view("<f4"), f32(lo, hi))
        assert np.array_equal(mm.decode(payload, x.size, 32), x)


@deterministic
@given(raw_vectors(allow_nonfinite=True))
def test_nonfinite_values_poison_their_block_only(x: F32) -> None:
    """A block with inf or NaN has NaN scales and codes of 0; the other blocks do not notice."""
    payload = mm.encode(x, 32)
    decoded = mm.decode(payload, x.size, 32)
    bits = payload[: 8 * -(-x.size // 32)].copy().view("<u4").reshape(-1, 2)
    codes = payload[mm.codes_offset(x.size, 32) :]
    for number, start in enumerate(range(0, x.size, 32)):
        part = x[start : start + 32]
        if np.isfinite(part).all():
            assert np.isfinite(decoded[start : start + 32]).all()
            assert np.array_equal(decoded[start : start + 32], mm.decode(mm.encode(part, 32), part.size, 32))
        else:
            assert np.array_equal(bits[number], [mm.NAN_BITS, mm.NAN_BITS])
            assert not codes[start : start + 32].any()
            assert np.isnan(decoded[start : start + 32]).all()
            assert np.isnan(mm.ideal_decode(x, 32)[start : start + 32]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_bytes(bad: float) -> None:
    """The scales of such a block have fixed bits, whatever the bits of the input."""
    x = np.ones(96, dtype=np.float32)
    x[40] = bad
    payload = mm.encode(x, 32, seed=1)
    assert payload[:24].tobytes().hex() == "0000803f0000803f" + "0000c07f0000c07f" + "0000803f0000803f"
    assert not payload[24:].any()


@folded(exponent=[-90, -61, -60, -1, 1, 59, 124], seed=[None, 11])
def test_powers_of_two_scale_through(exponent: int, seed: int | None) -> None:
    """C(k v) = k C(v), with the same codes, for powers of two."""
    z = np.random.default_rng(3).standard_normal(700)
    x = np.clip(np.rint(z * 2**20) / 2**20, -3.9, 3.9).astype(np.float32)
    k = np.float32(2.0**exponent)
    one, other = mm.encode(x, 64, seed), mm.encode(x * k, 64, seed)
    offset = mm.codes_offset(x.size, 64)
    assert np.array_equal(one[offset:], other[offset:])
    assert same_bits(one[:88].view(np.float32) * k, other[:88].view(np.float32))
    assert same_bits(mm.decode(one, x.size, 64) * k, mm.decode(other, x.size, 64))


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-3, 1e3, 1e8, 1e30])
def test_other_factors_scale_through_up_to_rounding(scale: float) -> None:
    """No absolute epsilon: levels agree at every scale, except for ties."""
    x = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    scaled = (x * np.float64(scale)).astype(np.float32)
    offset = mm.codes_offset(1000, 256)
    difference = mm.encode(x, 256)[offset:].astype(int) - mm.encode(scaled, 256)[offset:]
    assert np.abs(difference).max() <= 1
    assert np.count_nonzero(difference) <= 2


def test_byte_values_are_exact() -> None:
    """Integers from 0 to 255 are levels."""
    x = np.arange(256, dtype=np.float32)
    for shift in (0, -128, 1000):
        assert np.array_equal(mm.decode(mm.encode(x + np.float32(shift)), 256), x + np.float32(shift))


@deterministic
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=8), st.integers(1, 400), st.floats(-30, 30))
def test_reduce_agrees_with_float64(seeds: list[int], n: int, exponent: float) -> None:
    """The sum is the sum of the decoded vectors up to float32 rounding, and `reduce` encodes it."""
    inputs = [make(KINDS[s % 4], n, 10.0**exponent, s) for s in seeds]
    payloads = np.stack([mm.encode(x, 64, seed) for x, seed in zip(inputs, seeds, strict=True)])
    scale = 1 / len(seeds)
    decoded = np.stack([mm.decode(p, n, 64).astype(np.float64) for p in payloads])
    total = mm.decode_sum(payloads, n, scale, 64)
    slack = (len(seeds) + 2) * 2.0**-24 * np.abs(decoded).sum(axis=0) * scale + FLOAT32_TINIEST
    assert np.all(np.abs(total - decoded.sum(axis=0) * scale) <= slack)
    for seed in (None, 7):
        assert np.array_equal(mm.reduce(payloads, n, scale, 64, seed), mm.encode(total, 64, seed))


def test_reduce_order_and_zero() -> None:
    """Ranks are added in order, starting from +0, and the sum is multiplied by the factor."""
    payloads = np.stack([mm.encode(f32(v, v), 32) for v in (1.0, 2.0**25, -(2.0**25))])
    assert np.array_equal(mm.decode_sum(payloads, 2, 1.0, 32), f32(0.0, 0.0))
    assert np.array_equal(mm.decode_sum(payloads[[1, 2, 0]], 2, 1.0, 32), f32(1.0, 1.0))
    # Multiplied by the rounded third, not divided by 3: 5 tells the difference.
    thirds = mm.decode_sum(
        np.stack([mm.encode(np.full(2, v, dtype=np.float32), 32) for v in (1.0, 4.0, 0.0)]), 2, 1 / 3, 32
    )
    assert thirds.view(np.uint32).tolist() == [0x3FD55556] * 2
    negative_zeros = mm.encode(f32(-0.0, -0.0), 32)[None]
    assert same_bits(mm.decode_sum(negative_zeros, 2, 1.0, 32), f32(0.0, 0.0))


def test_reduce_overflow_and_nan() -> None:
    """A sum beyond float32 is inf before it is scaled, so its block becomes NaN; so does a NaN of any rank."""
    x, y = np.ones(64, dtype=np.float32), np.ones(64, dtype=np.float32)
    x[:32] = 3e38
    payloads = np.stack([mm.encode(x, 32), mm.encode(x, 32)])
    decoded = mm.decode(mm.reduce(payloads, 64, 0.5, 32), 64, 32)
    assert np.isnan(decoded[:32]).all()
    assert np.array_equal(decoded[32:], y[32:])
    y[5] = np.nan
    payloads = np.stack([mm.encode(y, 32), mm.encode(np.ones(64, dtype=np.float32), 32)])
    decoded = mm.decode(mm.reduce(payloads, 64, 0.5, 32), 64, 32)
    assert np.isnan(decoded[:32]).all()
    assert np.array_equal(decoded[32:], np.ones(32, dtype=np.float32))


@pytest.mark.parametrize(
    ("x", "index"), [(f32(1.5, -253.5), -1), (f32(1000.0, 1000.001), 256), (f32(100.0, 100.001), -2)]
)
def test_older_formula_leaves_the_byte_range(x: F32, index: int) -> None:
    """Inputs whose index does not fit a byte there, and are within the bound here."""
    assert index in mm.bagua_formula(x)
    check_against_mathematics(x, 32)


def test_older_formula_loses_levels_of_small_values() -> None:
    """Its epsilon is absolute: a range of 1e-8 has 24 levels there and 256 here."""
    x = np.linspace(0, 1e-8, 256, dtype=np.float32)
    assert np.unique(mm.bagua_formula(x)).size < 32
    assert np.unique(mm.encode(x)[16:]).size == 256
