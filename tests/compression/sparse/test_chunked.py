"""The contract of ChunkedTopK: the bytes of the wire format on every backend, error feedback that loses nothing, damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels.compression import ChunkedTopK
from tests.cases import DTYPES
from tests.conftest import EMULATED, Target
from tests.grids import grid, only
from tests.oracles import chunked as oracle
from tests.oracles.vectors import F32, FLOAT32_MAX, KINDS, make, raw_vectors, same_bits

# The default tier's: for each dtype kernels are compiled that nothing else needs.
FEW = torch.float32, torch.bfloat16
# With 2, 0, 4 and 6 low bits; the second keeps all elements.
CODECS = [ChunkedTopK(k=5, chunk=32), ChunkedTopK(k=32, chunk=32), ChunkedTopK(k=3, chunk=64)]
CODECS += [] if EMULATED else [ChunkedTopK(k=64, chunk=4096)]
# Whole chunks, and elements beyond them.
LENGTHS = {"empty": (0, 0), "one": (0, 1), "below": (1, -1), "chunk": (1, 0), "above": (1, 1), "short_last": (2, 19)}
LENGTHS |= {} if EMULATED else {"many": (70, 30)}
BETAS = [1.0, 0.9, 0.0]


def shape(codec: Any) -> tuple[int, int]:
    return codec.k, codec.chunk


def some(codec: Any) -> int:
    """A length of several chunks, the last of them short."""
    return (1 if EMULATED else 3) * codec.chunk + 11


def on(target: Target, x: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A copy of a vector there."""
    return torch.from_numpy(x.copy()).to(dtype).to(target.device)


def plain(x: torch.Tensor) -> np.ndarray:
    """The values, as float32; bytes stay such."""
    return (x if x.dtype == torch.uint8 else x.float()).cpu().numpy()


def decoded(codec: Any, payload: torch.Tensor, n: int) -> F32:
    return plain(codec.decode(payload, torch.empty(n, device=payload.device)))


def same(a: F32, b: F32) -> bool:
    """Compares bits, but those of NaN, which a decoder may choose."""
    return np.array_equal(np.isnan(a), np.isnan(b)) and same_bits(a[~np.isnan(a)], b[~np.isnan(b)])


def check(codec: Any, x: F32, target: Target) -> None:
    """Compares a payload and its values with the oracle's, but for the sign of zeros, which has a test of its own."""
    payload = codec.encode(on(target, x))
    expected = oracle.encode(x, *shape(codec))
    assert codec.payload_size(x.size) == expected.size
    assert np.array_equal(plain(payload), expected)
    out, values = decoded(codec, payload, x.size), oracle.decode(expected, x.size, *shape(codec))
    assert np.array_equal(out, values, equal_nan=True)
    assert not (np.signbit(out) & ~np.signbit(values) & ~np.isnan(out)).any()


def ranks(codec: Any, n: int, count: int) -> list[F32]:
    """Vectors of which some large elements are the same, so that elements have from no entry to one of each rank."""
    common = make("heavy", n, 1.0, 100)
    return [common + make("heavy", n, 1.0, rank) for rank in range(count)]


@grid(codec=CODECS, length=LENGTHS, dtype=only(DTYPES, *FEW))
def test_same_bytes_as_the_oracle(target: Target, codec: Any, length: tuple[int, int], dtype: torch.dtype) -> None:
    n = length[0] * codec.chunk + length[1]
    x = on(target, make("heavy", n, 1e-2, 0), dtype)
    expected = oracle.encode(plain(x), *shape(codec))
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.payload_size(n),) == (oracle.payload_size(n, *shape(codec)),)
    assert np.array_equal(plain(payload), expected)
    out = torch.empty_like(x)
    assert codec.decode(payload, out) is out
    values = torch.from_numpy(oracle.decode(expected, n, *shape(codec))).to(dtype)
    assert same_bits(plain(out), plain(values))


@grid(codec=CODECS, kind=KINDS)
def test_kinds(target: Target, codec: Any, kind: str) -> None:
    check(codec, make(kind, some(codec), 1.0, 5), target)


@grid(codec=CODECS, scale=[1e-42, 2.0**-93, 1e-27, 2.0**-84, 1e30, FLOAT32_MAX], kind=["gaussian", "mixed_scales"])
def test_scales(target: Target, codec: Any, scale: float, kind: str) -> None:
    """Also those where the magnitudes have few bits, none, and the most that a finite number can have."""
    check(codec, make(kind, some(codec), scale, 6), target)


@grid(cover=1, codec=CODECS, value=[-0.0, -3.7] if EMULATED else [0.0, -0.0, 1.0, -3.7, 1e-44, FLOAT32_MAX])
def test_ties_go_to_the_lowest_index(target: Target, value: float, codec: Any) -> None:
    n = some(codec)
    check(codec, np.full(n, value, np.float32), target)
    x = make("gaussian", n, 1e-3, 1)
    x[3::5] = -2.0
    check(codec, x, target)


@grid(cover=1, codec=CODECS)
def test_values_that_are_not_finite_stay_in_their_place(target: Target, codec: Any) -> None:
    n = some(codec)
    x = make("gaussian", n, 1.0, 1)
    x[[3, codec.chunk - 1, n - 1]] = np.inf, np.nan, -np.inf
    check(codec, x, target)
    out = decoded(codec, codec.encode(on(target, x)), n)
    assert np.flatnonzero(np.isnan(out)).tolist() == [3, codec.chunk - 1, n - 1]
    for bad in (np.where(np.arange(n) % 2 == 0, np.inf, x), np.full(n, -np.inf), np.full(n, np.nan)):
        check(codec, bad.astype(np.float32), target)
    x[:] = np.inf
    x[[9, 30]] = np.nan
    check(codec, x, target)


def test_no_element_is_minus_zero(target: Target) -> None:
    """The sign is in the payload, but values are added to +0."""
    codec = CODECS[0]
    for x in (np.full(70, -0.0, np.float32), np.full(70, -1e-44, np.float32)):
        payload = codec.encode(on(target, x))
        out = decoded(codec, payload, 70)
        assert not out.any()
        assert not np.signbit(out).any()


@given(x=raw_vectors(allow_nonfinite=True), codec=st.sampled_from(CODECS))
def test_any_floats(target: Target, x: F32, codec: Any) -> None:
    check(codec, x, target)


@given(key=st.lists(st.integers(0, 0x7F7F_FFFF), min_size=1, max_size=70), seed=st.integers(0, 99))
def test_any_finite_bits(target: Target, key: list[int], seed: int) -> None:
    """Bits of all exponents, and neighbours of one value, on which sums of integers depend."""
    rng = np.random.default_rng(seed)
    near = min(key[0], 0x7F7F_FF00) + rng.integers(0, 256, 40)
    for bits in (np.array(key), near):
        signs = rng.integers(0, 2, bits.size) << 31
        check(CODECS[0], (bits + signs).astype(np.uint32).view(np.float32), target)


@grid(cover=1, codec=CODECS)
def test_vectors_may_start_anywhere(target: Target, codec: Any) -> None:
    n = some(codec)
    buffer = on(target, make("heavy", n + 3, 1.0, 0))
    for start in (1, 3):
        x = buffer[start : start + n]
        payload = codec.encode(x)
        assert np.array_equal(plain(payload), oracle.encode(plain(x), *shape(codec)))
        out = torch.full_like(buffer, 7.0)
        codec.decode(payload, out[start : start + n])
        assert same_bits(plain(out[start : start + n]), oracle.decode(plain(payload), n, *shape(codec)))
        assert (out[:start] == 7).all()
        assert (out[start + n :] == 7).all()


def test_threads_make_the_same_bytes(target: Target) -> None:
    codec = CODECS[-1]
    n = (1 if EMULATED else 50) * codec.chunk + 7
    x, residual = make("heavy", n, 1.0, 0), make("gaussian", n, 1.0, 1)
    check(codec, x, target)
    left = on(target, residual)
    payload = codec.encode_feedback(on(target, x), left)
    expected, lost = oracle.feedback(x, residual, *shape(codec))
    assert np.array_equal(plain(payload), expected)
    assert same_bits(plain(left), lost)
    rows = torch.stack([payload, codec.encode(on(target, x))])
    out = codec.mean(rows, torch.empty(n, device=target.device), contributors=True)
    assert same_bits(plain(out), oracle.mean(list(plain(rows)), n, *shape(codec), contributors=True))


def test_given_memory_is_used(target: Target) -> None:
    codec = CODECS[0]
    x = on(target, make("gaussian", 70, 1.0, 0))
    expected = codec.encode(x)
    for write in (
        lambda out: codec.encode(x, seed=3, out=out),
        lambda out: codec.encode_feedback(x, torch.zeros_like(x), out=out),
        lambda out: codec.encode_outer(x, torch.zeros_like(x), torch.zeros_like(x), 1.0, out=out),
    ):
        out = torch.full_like(expected, 255)
        assert write(out) is out
        assert torch.equal(out, expected)


@grid(codec=CODECS, rows=[1, 3], dtype=DTYPES, scale=[1.0, 1 / 3])
def test_sums(target: Target, codec: Any, rows: int, dtype: torch.dtype, scale: float) -> None:
    n = some(codec)
    payloads = torch.stack([codec.encode(on(target, x)) for x in ranks(codec, n, rows)])
    total = np.zeros(n, np.float32)
    for payload in payloads:
        total += oracle.decode(plain(payload), n, *shape(codec))
    total *= np.float32(scale)
    out = torch.full((n,), 7.0, dtype=dtype, device=target.device)
    assert codec.decode_sum(payloads, out, scale) is out
    assert same_bits(plain(out), plain(torch.from_numpy(total).to(dtype)))
    reduced = codec.reduce(payloads, n, scale=scale)
    assert np.array_equal(plain(reduced), oracle.encode(total, *shape(codec)))


@grid(codec=CODECS, rows=[1, 2, 5], dtype=DTYPES, contributors=[True, False])
def test_means(target: Target, codec: Any, rows: int, dtype: torch.dtype, contributors: bool) -> None:
    n = some(codec)
    payloads = torch.stack([codec.encode(on(target, x)) for x in ranks(codec, n, rows)])
    out = torch.full((n,), 7.0, dtype=dtype, device=target.device)
    assert codec.mean(payloads, out, contributors=contributors) is out
    expected = oracle.mean(list(plain(payloads)), n, *shape(codec), contributors=contributors)
    assert same_bits(plain(out), plain(torch.from_numpy(expected).to(dtype)))


@pytest.mark.parametrize("contributors", [True, False])
def test_entries_of_zero_count_and_nan_stays_alone(target: Target, contributors: bool) -> None:
    codec = CODECS[0]
    zeros, ones, bad = np.full(70, -0.0, np.float32), np.ones(70, np.float32), make("gaussian", 70, 1.0, 0)
    bad[[2, 65]] = np.nan, -np.inf
    for vectors in ([zeros], [zeros, ones], [ones, bad], [bad, zeros, ones]):
        payloads = torch.stack([codec.encode(on(target, x)) for x in vectors])
        out = plain(codec.mean(payloads, torch.empty(70, device=target.device), contributors=contributors))
        assert same(out, oracle.mean(list(plain(payloads)), 70, *shape(codec), contributors=contributors))
        assert np.isnan(out)[[2, 65]].all() == any(x is bad for x in vectors)


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_begin_with_zero(target: Target, rows: int) -> None:
    """So that elements that no rank sent and those that they sent as -0 are the same; a negative scale turns both."""
    codec = CODECS[1]
    payloads = torch.stack([codec.encode(torch.full((5,), -0.0, device=target.device))] * rows)
    for scale in (1.0, -1.0):
        out = codec.decode_sum(payloads, torch.full((5,), 7.0, device=target.device), scale)
        assert same_bits(plain(out), np.full(5, 0.0 * scale, np.float32))


def test_sums_of_nothing(target: Target) -> None:
    codec = CODECS[0]
    for dtype in DTYPES:
        nobody = torch.empty((0, codec.payload_size(50)), dtype=torch.uint8, device=target.device)
        full = torch.full((50,), 7, dtype=dtype, device=target.device)
        for write in (
            lambda rows, out: codec.decode_sum(rows, out, 0.5),
            lambda rows, out: codec.mean(rows, out, contributors=True),
        ):
            assert not write(nobody, full.clone()).any()
            empty = torch.empty((2, 0), dtype=torch.uint8, device=target.device)
            assert write(empty, torch.empty(0, dtype=dtype, device=target.device)).numel() == 0


def conserved(residual: F32, sent: F32, a: F32) -> bool:
    """True if the new residual and what was sent add up to `a`, but for the rounding of their difference."""
    ulp = np.spacing(np.maximum(np.abs(a), np.abs(sent)))
    return bool((np.abs(residual.astype(np.float64) + sent - a) <= ulp).all())


@grid(codec=CODECS, dtype=only(DTYPES, *FEW), beta=BETAS)
def test_feedback(target: Target, codec: Any, dtype: torch.dtype, beta: float) -> None:
    n = some(codec)
    x, residual = on(target, make("heavy", n, 1e-2, 0), dtype), on(target, make("gaussian", n, 1.0, 1))
    before, given_x = plain(residual).copy(), x.clone()
    payload = codec.encode_feedback(x, residual, beta=beta)
    expected, lost = oracle.feedback(plain(x), before, *shape(codec), beta)
    assert np.array_equal(plain(payload), expected)
    assert same_bits(plain(residual), lost)
    assert torch.equal(x, given_x)
    assert conserved(plain(residual), decoded(codec, payload, n), np.float32(beta) * before + plain(x))


@grid(codec=CODECS, length=LENGTHS, kind=["gaussian", "ties", "subnormal", "zeros"], cover=1)
def test_feedback_of_lengths_and_kinds(target: Target, codec: Any, length: tuple[int, int], kind: str) -> None:
    """The decay is 1 by default, and then the payload is that of the sum."""
    n = length[0] * codec.chunk + length[1]
    x, before = (make(kind, n, 1.0, 0), make("gaussian", n, 1.0, 1)) if n else (np.zeros(0, np.float32),) * 2
    residual = on(target, before)
    payload = codec.encode_feedback(on(target, x), residual)
    expected, lost = oracle.feedback(x, before, *shape(codec))
    assert np.array_equal(plain(payload), expected)
    assert torch.equal(payload, codec.encode(on(target, before + x)))
    assert same_bits(plain(residual), lost)


@grid(cover=1, codec=CODECS[:3])
def test_feedback_of_values_that_become_zero(target: Target, codec: Any) -> None:
    """Entries of zeros leave the difference of two zeros; entries of tiny values leave all of them."""
    n = some(codec)
    for kind, scale in (("zeros", 1.0), ("gaussian", 1e-35), ("subnormal", 1.0)):
        x, before = make(kind, n, scale, 0), make("zeros", n, 0.0, 1)
        residual = on(target, before)
        payload = codec.encode_feedback(on(target, x), residual)
        expected, lost = oracle.feedback(x, before, *shape(codec))
        assert np.array_equal(plain(payload), expected)
        assert np.array_equal(plain(residual), lost)
        if kind != "zeros":
            assert not decoded(codec, payload, n).any()


@grid(codec=CODECS, dtype=only(DTYPES, *FEW), beta=BETAS)
def test_outer(target: Target, codec: Any, dtype: torch.dtype, beta: float) -> None:
    """Only what the parameters of the rank can show of `start` counts: it is rounded to their dtype."""
    n = some(codec)
    start, residual = on(target, make("gaussian", n, 1.0, 0)), on(target, make("gaussian", n, 0.01, 1))
    x = (start + on(target, make("gaussian", n, 0.01, 2))).to(dtype)
    before, copies = plain(residual).copy(), (start.clone(), x.clone())
    payload = codec.encode_outer(start, x, residual, beta)
    expected, lost = oracle.outer(plain(start.to(dtype)), plain(x), before, beta, *shape(codec))
    assert np.array_equal(plain(payload), expected)
    assert same_bits(plain(residual), lost)
    assert torch.equal(start, copies[0])
    assert torch.equal(x, copies[1])
    d = plain(start.to(dtype)) - plain(x)
    assert conserved(plain(residual), decoded(codec, payload, n), np.float32(beta) * before + d)


@grid(cover=1, length=LENGTHS)
def test_outer_of_lengths(target: Target, length: tuple[int, int]) -> None:
    codec = CODECS[-1]
    n = length[0] * codec.chunk + length[1]
    start, x, before = (make("gaussian", n, 1.0, seed) for seed in range(3))
    residual = on(target, before)
    payload = codec.encode_outer(on(target, start), on(target, x), residual, 0.9)
    expected, lost = oracle.outer(start, x, before, 0.9, *shape(codec))
    assert np.array_equal(plain(payload), expected)
    assert same_bits(plain(residual), lost)


def test_many_rounds_lose_nothing(target: Target) -> None:
    """What was sent in all rounds and the last residual are what came in."""
    codec = CODECS[0]
    n = some(codec)
    residual, came, sent = torch.zeros(n, device=target.device), np.zeros(n), np.zeros(n)
    for round_ in range(3 if EMULATED else 30):
        x = make("gaussian", n, 1.0, round_)
        sent += decoded(codec, codec.encode_feedback(on(target, x), residual), n)
        came += x
    assert np.allclose(sent + plain(residual), came, atol=1e-4)
    assert np.abs(plain(residual)).max() < 40


@grid(bad=[float("inf"), float("-inf"), float("nan")], side=["vector", "residual"], codec=CODECS, cover=1)
def test_what_is_not_finite_arrives_and_leaves_no_residual(target: Target, bad: float, side: str, codec: Any) -> None:
    n = some(codec)
    x, before, zero = make("gaussian", n, 1.0, 1), make("gaussian", n, 1.0, 2), np.zeros(n, np.float32)
    places = [1, codec.chunk - 1, codec.chunk, n - 1]
    (x if side == "vector" else before)[places] = bad
    expected, lost = oracle.feedback(x, before, *shape(codec), 0.9)
    for encode in (
        lambda r: codec.encode_feedback(on(target, x), r, beta=0.9),
        lambda r: codec.encode_outer(on(target, zero), on(target, -x), r, 0.9),
    ):
        residual = on(target, before)
        payload = encode(residual)
        # The sign of a NaN after arithmetic is not that of all devices.
        if not np.isnan(bad):
            assert np.array_equal(plain(payload), expected)
        assert same_bits(plain(residual), lost)
        assert not plain(residual)[places].any()
        out, want = decoded(codec, payload, n), oracle.decode(expected, n, *shape(codec))
        assert same(out, want)
        # The last chunk keeps one element or more, the others three or more.
        assert np.isnan(out)[places[:2]].all()
        assert np.isnan(out)[places[2]]


def test_sums_beyond_float32_are_not_finite(target: Target) -> None:
    codec = CODECS[0]
    x = np.full(40, FLOAT32_MAX, np.float32)
    before = np.where(np.arange(40) == 2, np.float32(FLOAT32_MAX), np.float32(0))
    residual = on(target, before)
    payload = codec.encode_feedback(on(target, x), residual)
    expected, lost = oracle.feedback(x, before, *shape(codec))
    assert np.array_equal(plain(payload), expected)
    assert same_bits(plain(residual), lost)
    assert np.flatnonzero(np.isnan(decoded(codec, payload, 40))).tolist() == [2]


def slow_to_divide(k: int, n: int) -> F32:
    """One large value that four steps do not part from others, which are just above the mean."""
    x = np.zeros(n, np.float32)
    x[: max(1, k // 2) + 1] = 2.02 / k
    x[n // 3 % max(1, k // 2)] = 1.0
    return x


VECTORS: dict[str, Callable[[int, int], F32]] = {
    kind: lambda k, n, kind=kind: make(kind, n, 1.0, 3)  # type: ignore[misc]
    for kind in ("gaussian", "heavy", "one_hot", "constant", "ties", "offset")
}
VECTORS |= {
    "slow_to_divide": slow_to_divide,
    "powers": lambda k, n: (2.0 ** -np.minimum(np.arange(n), 90)).astype(np.float32),
    "scales": lambda k, n: (32.0 ** (-0.7 * np.floor(np.log2(np.arange(n) + 1) / 5))).astype(np.float32),
}
