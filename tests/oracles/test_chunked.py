"""The oracle of ChunkedTopK against a record made by hand, against mathematics, and against damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grids import folded, grid
from tests.oracles import chunked
from tests.oracles.sparse import keys
from tests.oracles.vectors import F32, FLOAT32_MAX, KINDS, deterministic, f32, make, raw_vectors, same_bits

# (k, chunk): each part of a record at its smallest and beyond, k that divide the chunk and others.
SHAPES = [(1, 32), (2, 32), (5, 32), (17, 32), (31, 32), (32, 32), (3, 64), (100, 512), (64, 4096), (4096, 4096)]


def record_of(payload: chunked.U8, number: int, k: int, chunk: int) -> list[int]:
    """The words of a record."""
    size = sum(chunked.words(k, chunk))
    return payload[4 * size * number :][: 4 * size].copy().view("<u4").tolist()


def float_of(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def test_a_record_made_by_hand() -> None:
    x = np.zeros(32, np.float32)
    x[[3, 20]] = 1.0, -3.0
    payload = chunked.encode(x, 2, 32)
    # l = 4: low parts 3 and 4, high parts 0 and 1; the second entry has b and a minus.
    assert record_of(payload, 0, 2, 32) == [0x43, 0b101, 0b1100, 0x4040_3F80]
    assert np.array_equal(chunked.decode(payload, 32, 2, 32), x)


def test_sizes() -> None:
    assert chunked.words(64, 4096) == (12, 4, 4, 1)
    assert chunked.payload_size(4 * 4096, 64, 4096) == 4 * 84
    assert chunked.payload_size(4096, 64, 4096) == chunked.payload_size(1, 64, 4096) == 96
    assert chunked.payload_size(0, 64, 4096) == chunked.encode(f32(), 64, 4096).size == 0
    assert chunked.words(4096, 4096) == (0, 256, 256, 1)
    assert chunked.words(1, 32) == (1, 1, 1, 1)
    assert [chunked.kept(m, 5, 32) for m in (1, 3, 9, 10, 16, 31, 32)] == [1, 1, 1, 2, 3, 5, 5]


LENGTHS = (1, 31, 32, 33, 95, 4096, 4100, 9001)


@grid(shape=SHAPES, n=LENGTHS, kind=KINDS, cover=1, most=1)
def test_round_trips(shape: tuple[int, int], n: int, kind: str) -> None:
    check_round_trip(shape, n, kind)


@pytest.mark.slow
@grid(shape=SHAPES)
@folded(n=LENGTHS, kind=KINDS)
def test_all_round_trips(shape: tuple[int, int], n: int, kind: str) -> None:
    check_round_trip(shape, n, kind)


def check_round_trip(shape: tuple[int, int], n: int, kind: str) -> None:
    """The entries are the largest, and they keep their signs; the payload of what was decoded has the same entries."""
    k, chunk = shape
    x = make(kind, n, 1.0, 3)
    payload = chunked.encode(x, k, chunk)
    assert payload.size == chunked.payload_size(n, k, chunk)
    out, chosen = chunked.decode(payload, n, k, chunk), chunked.entries(payload, n, k, chunk)
    assert not out[~chosen].view(np.uint32).any()
    signed = chosen & (out != 0) & np.isfinite(x)
    assert np.array_equal(np.signbit(out[signed]), np.signbit(x[signed]))
    for start in range(0, n, chunk):
        key, sent = keys(x[start : start + chunk]), chosen[start : start + chunk]
        assert sent.sum() == (k if key.size == chunk else max(1, int(np.floor(k * key.size / chunk + 0.5))))
        assert sent.all() or key[sent].min() >= key[~sent].max()
        assert len(set(np.abs(out[start : start + chunk][sent]).tolist())) <= 2
    if (out[chosen] != 0).all():
        again = chunked.encode(out, k, chunk)
        assert np.array_equal(chunked.entries(again, n, k, chunk), chosen)


@deterministic
@given(x=raw_vectors(allow_nonfinite=True), k=st.integers(1, 32))
def test_any_floats(x: F32, k: int) -> None:
    payload = chunked.encode(x, k, 32)
    out, chosen = chunked.decode(payload, x.size, k, 32), chunked.entries(payload, x.size, k, 32)
    assert np.array_equal(np.isnan(out), ~np.isfinite(x) & chosen)
    signed = chosen & (out != 0) & np.isfinite(x)
    assert np.array_equal(np.signbit(out[signed]), np.signbit(x[signed]))
    assert not out[~chosen].view(np.uint32).any()


def draw(law: str, shape: tuple[int, ...]) -> F32:
    rng = np.random.default_rng(0)
    draws = {
        "gauss": rng.standard_normal(shape),
        "laplace": rng.laplace(size=shape),
        "student": rng.standard_t(4, shape),
    }
    return draws[law].astype(np.float32)


@pytest.mark.parametrize(("law", "limit"), [("gauss", 0.07), ("laplace", 0.12), ("student", 0.21)])
def test_values_are_near(law: str, limit: float) -> None:
    """The relative error of the entries, which is near the least that two magnitudes of a chunk can have."""
    x = draw(law, (100, 4096))
    payload = chunked.encode(x.ravel(), 64, 4096)
    out = chunked.decode(payload, x.size, 64, 4096).reshape(x.shape).astype(np.float64)
    chosen = out != 0
    assert (chosen.sum(axis=1) == 64).all()
    errors = np.where(chosen, out - x, 0)
    assert np.sum(errors**2) <= limit**2 * np.sum(x[chosen].astype(np.float64) ** 2)
    assert np.sum(errors**2) <= 1.2 * sum(least_error(np.abs(x[row][chosen[row]])) for row in range(100))


def least_error(values: F32) -> float:
    """The least square error of two magnitudes for some values, over all places where these can be divided."""
    z = np.sort(values.astype(np.float64))

    def spread(group: np.ndarray) -> float:
        return float(np.sum((group - group.mean()) ** 2))

    return min(spread(z), *(spread(z[:at]) + spread(z[at:]) for at in range(1, z.size)))


@grid(shape=[(64, 4096), (5, 32), (32, 32)], kind=["gaussian", "heavy", "one_hot", "ties", "offset"])
def test_two_magnitudes_are_no_worse_than_one(shape: tuple[int, int], kind: str) -> None:
    k, chunk = shape
    x = make(kind, chunk, 1.0, 5)
    payload = chunked.encode(x, k, chunk)
    chosen = chunked.entries(payload, chunk, k, chunk)
    z = np.abs(x[chosen].astype(np.float64))
    error = np.abs(chunked.decode(payload, chunk, k, chunk)[chosen]) - z
    # What is left is the rounding of the magnitudes to 8 bits.
    assert np.sum(error**2) <= np.sum((z - z.mean()) ** 2) + 2.0**-17 * np.sum(z**2)


@grid(cover=1, s=range(-40, 41, 8), law=["gauss", "student"])
def test_powers_of_two_scale_the_magnitudes_only(law: str, s: int) -> None:
    x = draw(law, (3 * 4096,))
    plain, scaled = chunked.encode(x, 64, 4096), chunked.encode(np.ldexp(x, s), 64, 4096)
    for number in range(3):
        *places, both = record_of(plain, number, 64, 4096)
        *same, other = record_of(scaled, number, 64, 4096)
        assert same == places
        assert float_of(other & 0xFFFF) == 2.0**s * float_of(both & 0xFFFF)
        assert float_of(other >> 16) == 2.0**s * float_of(both >> 16)


def test_order_and_signs_do_not_change_the_magnitudes() -> None:
    x = draw("student", (4096,))
    shuffled = np.random.default_rng(1).permutation(x)
    words = record_of(chunked.encode(x, 64, 4096), 0, 64, 4096)
    assert record_of(chunked.encode(shuffled, 64, 4096), 0, 64, 4096)[-1] == words[-1]
    minus = record_of(chunked.encode(-x, 64, 4096), 0, 64, 4096)
    signs = [0] * 16 + [0xAAAA_AAAA] * 4 + [0]
    assert minus == [word ^ sign for word, sign in zip(words, signs, strict=True)]


@folded(shape=SHAPES, value=[1.0, -3.5, 0.0, -0.0, 2.0**100, 2.0**-86])
def test_constants_are_exact_and_ties_go_to_the_lowest_index(shape: tuple[int, int], value: float) -> None:
    k, chunk = shape
    n = chunk + chunk // 2
    payload = chunked.encode(np.full(n, value, np.float32), k, chunk)
    chosen = np.zeros(n, np.bool_)
    chosen[:k] = chosen[chunk : chunk + chunked.kept(chunk // 2, k, chunk)] = True
    assert np.array_equal(chunked.entries(payload, n, k, chunk), chosen)
    expected = np.where(chosen, np.float32(value), np.float32(0))
    assert np.array_equal(chunked.decode(payload, n, k, chunk), expected)
    first = record_of(payload, 0, k, chunk)
    assert first[-1] & 0xFFFF == first[-1] >> 16


def test_ties_at_the_last_place() -> None:
    x = np.where(np.arange(32) % 3 == 1, np.float32(-2), np.float32(1))
    x[7] = 5
    chosen = chunked.entries(chunked.encode(x, 4, 32), 32, 4, 32)
    assert np.flatnonzero(chosen).tolist() == [1, 4, 7, 10]


def test_the_ends_of_float32() -> None:
    """The greatest magnitude is finite, and values below 2^-94 keep their places and signs but become zero."""
    greatest = chunked.encode(np.full(32, FLOAT32_MAX, np.float32), 5, 32)
    assert chunked.decode(greatest, 32, 5, 32)[0] == float_of(0x7F7F)
    tiny = np.zeros(32, np.float32)
    tiny[[8, 9]] = 2.0**-95, -(2.0**-149)
    payload = chunked.encode(tiny, 2, 32)
    assert np.flatnonzero(chunked.entries(payload, 32, 2, 32)).tolist() == [8, 9]
    assert same_bits(chunked.decode(payload, 32, 2, 32)[8:10], f32(0.0, 0.0))
    tiny[8] = 2.0**-86
    assert chunked.decode(chunked.encode(tiny, 2, 32), 32, 2, 32)[8] == np.float32(2.0**-86)


def test_values_that_are_not_finite_decode_to_nan_in_their_place() -> None:
    x = make("gaussian", 3 * 64, 1.0, 2)
    x[[3, 40, 130]] = np.inf, np.nan, -np.inf
    payload = chunked.encode(x, 5, 64)
    out, chosen = chunked.decode(payload, x.size, 5, 64), chunked.entries(payload, x.size, 5, 64)
    assert np.flatnonzero(np.isnan(out)).tolist() == [3, 40, 130]
    for number, start in enumerate(range(0, x.size, 64)):
        both = record_of(payload, number, 5, 64)[-1]
        value, sent = x[start : start + 64], chosen[start : start + 64]
        if not np.isfinite(value).all():
            finite = np.abs(value[sent & np.isfinite(value)].astype(np.float64))
            assert both >> 16 == 0x7FC0
            assert float_of(both & 0xFFFF) == pytest.approx(finite.mean(), rel=2.0**-8)
            assert (np.abs(out[start : start + 64][sent & np.isfinite(value)]) == float_of(both & 0xFFFF)).all()
        else:
            assert (both >> 16) < 0x7F80
    # NaN is above infinity, and where all entries are such the other magnitude is zero.
    full = np.full(64, np.inf, np.float32)
    full[60:] = np.nan
    payload = chunked.encode(full, 4, 64)
    assert np.flatnonzero(chunked.entries(payload, 64, 4, 64)).tolist() == [60, 61, 62, 63]
    assert record_of(payload, 0, 4, 64)[-1] == 0x7FC0_0000


def damaged(payload: chunked.U8, changes: dict[int, int]) -> chunked.U8:
    """A copy that has other words at some places."""
    out = payload.copy()
    for word, value in changes.items():
        out.view("<u4")[word] = value
    return out


# Chunk 0 has elements 3 and 20 of 32, low parts 3 and 4, high parts 0 and 1; chunk 1 has element 1 of 20.
SMALL = chunked.encode(np.where(np.isin(np.arange(52), [3, 20, 33]), f32(1.0), f32(0.0)), 2, 32)


@grid(
    cover=1,
    changes__message=[
        ({1: 0b100}, "set bits"),
        ({1: 0}, "set bits"),
        ({1: 0b111}, "set bits"),
        ({1: 0b101 | 1 << 31}, "set bits"),
        ({5: 0b11}, "set bits"),
        ({0: 0x33, 1: 0b11}, "ascend"),  # elements 3 and 3
        ({0: 0x34, 1: 0b11}, "ascend"),  # elements 4 and 3
        ({1: 0b1001}, "beyond"),  # elements 3 and 36
        ({1: 1 << 31 | 1}, "beyond"),
        ({4: 0x4, 5: 0b10}, "beyond"),  # element 20 of 20
    ],
)
def test_damaged_payloads_are_refused(changes: dict[int, int], message: str) -> None:
    assert record_of(SMALL, 0, 2, 32)[:2] == [0x43, 0b101]
    assert record_of(SMALL, 1, 2, 32)[:2] == [0x01, 0b001]
    changed = damaged(SMALL, changes)
    for read in (chunked.decode, chunked.entries):
        with pytest.raises(ValueError, match=message):
            read(changed, 52, 2, 32)
    with pytest.raises(ValueError, match=message):
        chunked.mean([SMALL, changed], 52, 2, 32, contributors=True)


def test_what_is_no_damage() -> None:
    """The last element of a short chunk, and bits of entries that it does not have."""
    assert chunked.entries(damaged(SMALL, {4: 0x3, 5: 0b10}), 52, 2, 32)[32 + 19]
    assert chunked.entries(damaged(SMALL, {0: 0x43, 1: 0b11}), 52, 2, 32)[[3, 4]].all()
    ignored = damaged(SMALL, {4: 0xFFF1, 6: 0xFFFC})
    assert same_bits(chunked.decode(ignored, 52, 2, 32), chunked.decode(SMALL, 52, 2, 32))


def test_payloads_of_another_size_are_refused() -> None:
    for size in (0, 16, SMALL.size - 16):
        with pytest.raises(ValueError, match="another size"):
            chunked.decode(SMALL[:size], 52, 2, 32)
    with pytest.raises(ValueError, match="another size"):
        chunked.decode(SMALL, 65, 2, 32)


@grid(shape=[(5, 32), (32, 32), (64, 4096)], kind=["gaussian", "heavy", "ties"], beta=[1.0, 0.95, 0.0])
def test_feedback_loses_nothing(shape: tuple[int, int], kind: str, beta: float) -> None:
    k, chunk = shape
    n = 2 * chunk + 5
    x, residual, start = make(kind, n, 1.0, 1), make("gaussian", n, 0.3, 2), make("gaussian", n, 1.0, 3)
    for (payload, new), d in [
        (chunked.feedback(x, residual, k, chunk, beta), x),
        (chunked.outer(start, x, residual, beta, k, chunk), start - x),
    ]:
        out = chunked.decode(payload, n, k, chunk)
        a = np.float32(beta) * residual + d
        assert a.dtype == new.dtype == np.float32
        assert np.array_equal(payload, chunked.encode(a, k, chunk))
        error = np.abs(new.astype(np.float64) + out - a)
        assert (error <= np.spacing(np.maximum(np.abs(a), np.abs(out))) / 2).all()
        assert same_bits(new[~chunked.entries(payload, n, k, chunk)], a[~chunked.entries(payload, n, k, chunk)])


def test_feedback_keeps_nothing_that_is_not_finite() -> None:
    x, residual = make("gaussian", 64, 1.0, 1), make("gaussian", 64, 1.0, 2)
    x[[1, 33, 34]] = np.inf, np.nan, FLOAT32_MAX
    residual[[5, 34]] = -np.inf, FLOAT32_MAX
    payload, new = chunked.feedback(x, residual, 3, 32)
    out = chunked.decode(payload, 64, 3, 32)
    assert np.flatnonzero(np.isnan(out)).tolist() == [1, 5, 33, 34]
    assert not new[[1, 5, 33, 34]].any()
    assert np.isfinite(new).all()
    others = np.isfinite(out)
    assert np.allclose(new[others] + out[others], x[others] + residual[others], rtol=1e-6)


def test_means() -> None:
    """Three ranks: an element has one entry, two, three, or none, and a value of zero counts as an entry."""
    rows = np.zeros((3, 32), np.float32)
    rows[0, [4, 9]], rows[1, [4, 11]], rows[2, [4, 11]] = (6, -4), (1, 2), (2, 8)
    payloads = [chunked.encode(row, 2, 32) for row in rows]
    of_senders = chunked.mean(payloads, 32, 2, 32, contributors=True)
    of_all = chunked.mean(payloads, 32, 2, 32, contributors=False)
    assert (of_senders[4], of_senders[9], of_senders[11]) == (3, -4, 5)
    assert np.allclose(of_all[[4, 9, 11]], [3, -4 / 3, 10 / 3])
    assert np.count_nonzero(of_senders) == np.count_nonzero(of_all) == 3
    zeros = chunked.encode(np.full(32, -0.0, np.float32), 5, 32)
    ones = chunked.encode(np.ones(32, np.float32), 5, 32)
    half = chunked.mean([zeros, ones], 32, 5, 32, contributors=True)
    assert half.tolist() == [0.5] * 5 + [0.0] * 27
    assert not np.signbit(chunked.mean([zeros], 32, 5, 32, contributors=True)).any()
