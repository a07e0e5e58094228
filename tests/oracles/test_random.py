"""Tests of stochastic rounding and of the random numbers behind it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grids import grid
from tests.oracles import minmax_uint8 as mm
from tests.oracles.vectors import F32, F64, U32, deterministic, make


def unbiasedness(x: F32, codecs: list[F32]) -> float:
    """Returns `N |mean - x|^2 / E|C(x) - x|^2`, which is near 1 for an unbiased codec and near N for nearest."""
    errors = np.stack(codecs).astype(np.float64) - x
    return float(len(codecs) * np.sum(errors.mean(axis=0) ** 2) / np.mean(np.sum(errors**2, axis=1)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "low", "high"), [("gaussian", 0.85, 1.2), ("heavy", 0.7, 1.35), ("ties", 0.8, 1.25)])
def test_stochastic_rounding_is_unbiased(kind: str, low: float, high: float) -> None:
    """Neighbouring seeds are independent draws, and their mean converges to the input."""
    x = make(kind, 4096, 1.0, 8)
    draws = [mm.decode(mm.encode(x, 256, seed), x.size, 256) for seed in range(400)]
    assert low < unbiasedness(x, draws) < high


def test_unbiasedness_statistic_sees_a_bias() -> None:
    """The statistic is N for a codec without randomness."""
    x = make("gaussian", 4096, 1.0, 8)
    nearest = mm.decode(mm.encode(x, 256), x.size, 256)
    assert unbiasedness(x, [nearest] * 400) == pytest.approx(400)


def test_levels_hardly_move() -> None:
    """A value on a level keeps it unless the dither is within 2^-17 of the tie."""
    x = np.arange(256, dtype=np.float32)
    for seed in range(20):
        assert np.array_equal(mm.decode(mm.encode(x, 256, seed), 256, 256), x)


def scalar_random(seed: int, e: int) -> int:
    """Returns `r(e)` in Python's integers."""
    m = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & m
        x ^= x >> 15
        x = x * 0x846CA68B & m
        return x ^ x >> 16

    k0 = mix((seed & m) ^ mix((seed >> 32 & m) ^ mix((e >> 32) + 0x9E3779B9 & m)))
    k1 = mix((seed >> 32 & m) ^ mix((seed & m) ^ mix((e >> 32) + 0x85EBCA6B & m)))
    x = ((e & m) * 0x9E3779B9 + k0) & m
    x ^= x >> 16
    x = (x * 0x7FEB352D & m) ^ k1
    x ^= x >> 15
    x = x * 0x846CA68B & m
    return x ^ x >> 16


@pytest.mark.parametrize(
    ("seed", "index", "value"),
    [
        (0, 0, 0x4B126537),
        (0, 1, 0x79EBA9B4),
        (1, 0, 0x6D977F7B),
        (0x123456789ABCDEF0, 0, 0xC9F4FC9C),
        (2**64 - 1, 2**32 - 1, 0xDDBECBC3),
        (2**64 - 1, 2**32, 0x61DADAC3),
        (7, 255, 0x6FB3E68D),
        (7, 2**40 + 3, 0xD919905C),
    ],
)
def test_golden_random_numbers(seed: int, index: int, value: int) -> None:
    """Fixed values, so that the random numbers cannot drift."""
    assert int(mm.random(seed, index, 1)[0]) == value == scalar_random(seed, index)


@deterministic
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 17) | st.integers(2**32 - 16, 2**32))
def test_random_agrees_with_python_integers(seed: int, first: int) -> None:
    """All 64 bits of seed and index count, also where the low half of the index overflows."""
    assert mm.random(seed, first, 16).tolist() == [scalar_random(seed, first + i) for i in range(16)]


def test_dither_is_exact_and_in_range() -> None:
    """2^24 equally spaced values in [-0.5, 0.5)."""
    r, d = mm.random(9, 5, 10_000), mm.dither(9, 5, 10_000)
    assert d.dtype == np.float32
    assert np.array_equal((d.astype(np.float64) + 0.5) * 2**24, r >> np.uint32(8))
    assert -0.5 <= d.min() < -0.499
    assert 0.499 < d.max() < 0.5


N = 2**18
SEEDS = (0, 1, 42, 2**40 + 17)


def correlation_z(a: U32, b: U32) -> float:
    """Returns the correlation of two samples in standard deviations."""
    return float(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1] * np.sqrt(a.size))


def chi_square_z(cells: npt.NDArray[Any], count: int) -> float:
    """Returns the chi-square statistic of uniform cells, standardised."""
    expected = cells.size / count
    histogram = np.bincount(cells, minlength=count)
    return float((np.sum((histogram - expected) ** 2) / expected - (count - 1)) / np.sqrt(2 * (count - 1)))


@grid(cover=1, seed=SEEDS)
def test_random_moments(seed: int) -> None:
    """Mean and variance of the dither are those of the uniform distribution."""
    d = mm.dither(seed, 0, N).astype(np.float64)
    assert abs(d.mean()) * np.sqrt(12 * N) < 4
    assert abs(d.var() - 1 / 12) * np.sqrt(180 * N) < 4


@grid(cover=1, seed=SEEDS)
def test_random_bytes_are_uniform(seed: int) -> None:
    """Each of the four bytes, and pairs of the high bytes of neighbours, fill their cells evenly."""
    r = mm.random(seed, 0, N)
    for shift in (0, 8, 16, 24):
        assert abs(chi_square_z(r >> np.uint32(shift) & np.uint32(255), 256)) < 4.5
    high = (r >> np.uint32(24)).astype(np.int64)
    for lag in (1, 256):
        assert abs(chi_square_z(high[lag:] * 256 + high[:-lag], 65536)) < 4.5


@grid(cover=1, seed=SEEDS)
def test_random_has_no_serial_correlation(seed: int) -> None:
    """Neighbours, elements at the same place of neighbouring blocks, and larger strides."""
    r = mm.random(seed, 0, N)
    for lag in (1, 2, 3, 4, 16, 32, 255, 256, 257, 512, 1024, 4096, 65536):
        assert abs(correlation_z(r[lag:], r[:-lag])) < 4.5


@grid(cover=1, seed=SEEDS)
def test_random_of_neighbouring_seeds_is_uncorrelated(seed: int) -> None:
    """Seeds that differ by little give independent numbers, at the same and at neighbouring elements."""
    r = mm.random(seed, 0, N)
    for other in (seed + 1, seed + 2, seed ^ 256, seed + 2**32, seed ^ 2**63):
        q = mm.random(other, 0, N)
        assert np.count_nonzero(r == q) < 3
        for lag in (0, 1, 256):
            assert abs(correlation_z(r[lag:], q[: N - lag])) < 4.5
        pairs = (r >> np.uint32(24)).astype(np.int64) * 256 + (q >> np.uint32(24))
        assert abs(chi_square_z(pairs, 65536)) < 4.5


def test_random_over_seeds_is_uniform() -> None:
    """One element over many seeds: the numbers that decide whether rounding is unbiased."""
    r = np.concatenate([mm.random(seed, 1000, 4) for seed in range(5000)]).reshape(-1, 4)
    for column in r.T:
        assert abs(chi_square_z(column >> np.uint32(24), 256)) < 4.5
        assert abs(correlation_z(column[1:], column[:-1])) < 4.5
    assert abs(correlation_z(r[:, 0], r[:, 1])) < 4.5


def flip_rates(changed: U32) -> F64:
    """Returns for each of the 32 bits how often it is set."""
    return np.array([np.mean(changed >> np.uint32(b) & np.uint32(1)) for b in range(32)])


def test_avalanche_of_the_index() -> None:
    """Flipping any bit of the index flips each bit of the number half of the time."""
    index = np.arange(2**13, dtype=np.uint64)
    base = [mm.random_at(seed, index) for seed in SEEDS]
    for bit in range(64):
        flipped = [mm.random_at(seed, index ^ np.uint64(1 << bit)) for seed in SEEDS]
        rates = flip_rates(np.concatenate(base) ^ np.concatenate(flipped))
        assert abs(rates.mean() - 0.5) < 0.005
        assert np.abs(rates - 0.5).max() < 0.03


def test_avalanche_of_the_seed() -> None:
    """Flipping any bit of the seed flips each bit of the number half of the time."""
    seeds = [int(s) for s in np.random.default_rng(0).integers(0, 2**63, 32)]
    base = np.concatenate([mm.random(seed, 0, 256) for seed in seeds])
    for bit in range(64):
        rates = flip_rates(base ^ np.concatenate([mm.random(seed ^ (1 << bit), 0, 256) for seed in seeds]))
        assert abs(rates.mean() - 0.5) < 0.01
        assert np.abs(rates - 0.5).max() < 0.04
