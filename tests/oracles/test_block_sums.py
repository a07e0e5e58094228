"""The oracles of the block quantizers: sums of payloads, shared scales and error feedback."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import block_quantizers as bq
from tests.oracles.block_rules import Spec, tree
from tests.oracles.block_specs import NEAREST, deterministic, every, nearest
from tests.oracles.vectors import (
    F32,
    f32,
    make,
    raw_vectors,
    same_bits,
)

SHARED = Spec("absmax", 32, levels=1, bits=8, stochastic=True, shared=True)


@given(x=raw_vectors(allow_nonfinite=False), width=st.sampled_from([1, 2, 32, 4096]))
@deterministic
def test_tree_against_fsum(x: F32, width: int) -> None:
    x = x * np.float32(2.0**-13)
    row = np.zeros((1, width), dtype=np.float32)
    row[0, : min(width, x.size)] = x[:width]
    exact = math.fsum(row[0].tolist())
    # One rounding for each of the log2(width) additions on a number's way.
    bound = math.log2(width) * 2.0**-24 * 1.001 * math.fsum(np.abs(row[0]).tolist())
    assert abs(float(tree(row)[0]) - exact) <= bound


def test_tree_order() -> None:
    """Halves are added first: 2^24 + 1 - 2^24 + 0 is 0 in another order."""
    big = 2.0**24
    assert tree(f32(big, 1, -big, 0).reshape(1, 4))[0] == 1
    assert tree(f32(big, -big, 1, 0).reshape(1, 4))[0] == 0


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
