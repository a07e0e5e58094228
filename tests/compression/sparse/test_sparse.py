"""The contract of the sparsifiers: the bytes of the wire format on every backend, and the error that they declare."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels.compression import Codec, Contractive, Unbiased, from_spec
from bagua_kernels.compression.sparse.choice import RUN, sample_size, sampled_runs
from bagua_kernels.compression.sparse.form import kept
from bagua_kernels.compression.sparse.randomk import RandomK
from bagua_kernels.compression.sparse.threshold_topk import ThresholdTopK
from bagua_kernels.compression.sparse.topk import TopK
from bagua_kernels.launchers.select import permuted
from tests.cases import DTYPES, LENGTHS, SHORT_LENGTHS
from tests.conftest import EMULATED, Target
from tests.grids import grid
from tests.oracles import sparse as oracle
from tests.oracles.vectors import KINDS, make, raw_vectors, same_bits

lengths = SHORT_LENGTHS if EMULATED else LENGTHS
SEED = 0xFEDC_BA98_7654_3210
CODECS = [TopK(0.1), ThresholdTopK(0.1), RandomK(0.1), TopK(0.1, "cast:dtype=float16")]


def expected(codec: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices and the payload."""
    k = oracle.kept(codec.ratio, x.size)
    if isinstance(codec, TopK):
        index = oracle.topk(x, k)
        return index, oracle.payload(x, index, k)
    index = oracle.threshold_topk(x, codec.ratio, codec.sample) if x.size else np.zeros(0, np.int64)
    return index, oracle.payload(x, index, oracle.capacity(k, x.size))


def decoded(codec: Codec, payload: torch.Tensor, n: int) -> torch.Tensor:
    return codec.decode(payload, torch.empty(n, device=payload.device))


def check(codec: Any, x: np.ndarray, target: Target) -> None:
    payload = codec.encode(torch.from_numpy(x).to(target.device))
    index, plain = expected(codec, x)
    assert codec.payload_size(x.size) == plain.size
    assert np.array_equal(payload.cpu().numpy(), plain)
    assert same_bits(decoded(codec, payload, x.size).cpu().numpy(), oracle.dense(x, index))


@grid(n=lengths, dtype=DTYPES, codec=[TopK(), TopK(0.3), ThresholdTopK(), ThresholdTopK(0.3)])
def test_same_bytes_as_the_oracle(target: Target, n: int, dtype: torch.dtype, codec: Any) -> None:
    x = torch.from_numpy(make("heavy", n, 1e-2, 0)).to(dtype)
    index, plain = expected(codec, x.float().numpy())
    payload = codec.encode(x.to(target.device))
    assert payload.shape == (codec.payload_size(n),)
    assert np.array_equal(payload.cpu().numpy(), plain)
    out = codec.decode(payload, torch.empty_like(x, device=target.device)).cpu()
    assert torch.equal(out.float(), torch.from_numpy(oracle.dense(x.float().numpy(), index)))


@grid(kind=KINDS, codec=[TopK(0.05), ThresholdTopK(0.05)], cover=1)
def test_kinds(target: Target, kind: str, codec: Any) -> None:
    check(codec, make(kind, 300 if EMULATED else 20_001, 1.0, 5), target)


@grid(
    cover=1, codec=[TopK(0.05), ThresholdTopK(0.05)], value=[-0.0, -3.5] if EMULATED else [0.0, -0.0, 1.0, -3.5, 1e-44]
)
def test_ties_go_to_the_lowest_index(target: Target, value: float, codec: Any) -> None:
    n = 300 if EMULATED else 70_001
    check(codec, np.full(n, value, np.float32), target)
    x = make("gaussian", n, 1e-3, 1)
    x[7::9] = -2.0
    check(codec, x, target)
    check(codec, -np.abs(x), target)


@grid(cover=1, codec=[TopK(0.02), ThresholdTopK(0.02)])
def test_non_finite_values_are_sent_first(target: Target, codec: Any) -> None:
    x = make("gaussian", 500, 1.0, 1)
    x[[3, 100, 499]] = np.inf, np.nan, -np.inf
    check(codec, x, target)
    out = decoded(codec, codec.encode(torch.from_numpy(x).to(target.device)), 500).cpu()
    assert (~out.isfinite()).nonzero().view(-1).tolist() == [3, 100, 499]
    check(codec, np.where(np.arange(500) % 2 == 0, np.inf, x).astype(np.float32), target)


@given(x=raw_vectors(allow_nonfinite=True), ratio=st.floats(0.01, 1.0))
def test_any_floats(target: Target, x: np.ndarray, ratio: float) -> None:
    check(TopK(ratio), x, target)
    check(ThresholdTopK(ratio), x, target)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_permutation_is_one(target: Target, n: int, seed: int) -> None:
    n = n % 100 + 1 if EMULATED else n
    positions = permuted(n, n, seed, target.device).tolist()
    assert sorted(positions) == list(range(n))
    some = min(n, 50)
    assert positions[:some] == oracle.permutation(n, some, seed)


@pytest.mark.parametrize("n", [2**31 + 11, 2**40 + 3])
def test_permutation_of_long_vectors(target: Target, n: int) -> None:
    assert permuted(n, 20, SEED, target.device).tolist() == oracle.permutation(n, 20, SEED)


@grid(cover=1, unbiased=[False, True], n=[1, 17, 257] if EMULATED else [0, 1, 17, 257, 10_007])
def test_randomk_keeps_what_the_seed_says(target: Target, n: int, unbiased: bool) -> None:
    codec = RandomK(0.1, unbiased)
    state = torch.get_rng_state()
    x = torch.from_numpy(make("gaussian", n, 1.0, 0))
    payload = codec.encode(x.to(target.device), seed=SEED)
    k = kept(0.1, n)
    index = oracle.permutation(n, k, SEED)
    assert len(set(index)) == k
    factor = np.float32(n / k) if unbiased and n else np.float32(1)
    if n:
        plain = np.concatenate([
            oracle.part(np.array([k, SEED], "<u8")), oracle.part(x.numpy()[index] * factor)
        ])  # fmt: skip
        assert np.array_equal(payload.cpu().numpy(), plain)
    out = decoded(codec, payload, n).cpu().numpy()
    assert np.array_equal(out, oracle.dense(x.numpy(), np.array(index, np.int64)) * factor)
    assert torch.equal(state, torch.get_rng_state())


def test_randomk_marks_what_is_not_finite(target: Target) -> None:
    """By value 0, which then is one NaN, whatever the element was; other values are as they are."""
    n = 60
    x = make("gaussian", n, 1.0, 0)
    index = oracle.permutation(n, 6, SEED)
    for place in (index[0], index[3], min(set(range(n)) - set(index))):
        for bad in (np.inf, -np.inf, np.nan):
            x[place] = bad
            values = x[index].view(np.uint32).copy()
            values[0] = 0x7FC00000
            plain = np.concatenate([oracle.part(np.array([6, SEED], "<u8")), oracle.part(values)])
            payload = RandomK(0.1).encode(torch.from_numpy(x).to(target.device), seed=SEED)
            assert np.array_equal(payload.cpu().numpy(), plain)
            assert decoded(RandomK(0.1), payload, n).isnan().all()
        x[place] = 1.0


@pytest.mark.parametrize("values", ["identity", "cast:dtype=float16"])
def test_randomk_is_linear(target: Target, values: str) -> None:
    codec = RandomK(0.2, values=values)
    assert codec.linear
    # Small integers, so that the sum is exact in either format.
    a, b = (torch.randint(-99, 99, (200,), generator=torch.Generator().manual_seed(s)).float() for s in (0, 1))
    first, second = (codec.encode(v.to(target.device), seed=9) for v in (a, b))
    both = decoded(codec, codec.encode((a + b).to(target.device), seed=9), 200)
    assert torch.equal(codec.decode_sum(torch.stack([first, second]), torch.empty_like(both)), both)
    codec.summable(first).add_(codec.summable(second))
    assert torch.equal(decoded(codec, first, 200), both)


@pytest.mark.slow
def test_randomk_is_unbiased(target: Target) -> None:
    if EMULATED:
        pytest.skip("statistics are a matter of the bytes, which other tests compare")
    codec = RandomK(0.05, unbiased=True)
    x = torch.from_numpy(make("gaussian", 4096, 1.0, 8)).to(target.device)
    errors = torch.stack([decoded(codec, codec.encode(x, seed=s), 4096) - x for s in range(400)]).double()
    statistic = float(400 * errors.mean(0).square().sum() / errors.square().sum(1).mean())
    assert 0.85 < statistic < 1.2
    assert isinstance(codec.bias, Unbiased)
    assert errors.square().sum(1).mean() <= codec.bias.omega * x.double().square().sum()


@grid(
    kind=["gaussian", "heavy", "constant", "one_hot"],
    codec=[TopK(0.02), ThresholdTopK(0.02), RandomK(0.02), TopK(0.02, "minmax_uint8")],
    cover=1,
)
def test_declared_contraction_holds(target: Target, codec: Any, kind: str) -> None:
    if EMULATED:
        pytest.skip("statistics are a matter of the bytes, which other tests compare")
    assert isinstance(codec.bias, Contractive)
    for n in (30, 99, 1000):
        x = torch.from_numpy(make(kind, n, 1.0, 3)).to(target.device)
        draws = 200 if codec.shared_seed else 1
        errors = [float((decoded(codec, codec.encode(x, seed=s), n) - x).double().square().sum()) for s in range(draws)]
        # A mean over seeds comes near the bound, and one large element decides it where the others are small.
        if not codec.shared_seed or kind in ("gaussian", "constant"):
            noise = 0.01 if codec.shared_seed else 1e-6
            assert np.mean(errors) <= (1 - codec.bias.delta) * float(x.double().square().sum()) * (1 + noise)


@grid(dtype=DTYPES, codec=CODECS, cover=1)
def test_feedback_is_the_unfused_sequence(target: Target, dtype: torch.dtype, codec: Any) -> None:
    n = 65 if EMULATED else 70_001
    x = torch.from_numpy(make("heavy", n, 1.0, 0)).to(dtype).to(target.device)
    residual = torch.from_numpy(make("gaussian", n, 1.0, 1)).to(target.device)
    before, total = residual.clone(), residual + x.float()
    payload = codec.encode_feedback(x, residual, seed=SEED)
    assert torch.equal(payload, codec.encode(total, seed=SEED))
    lost = total - decoded(codec, payload, n)
    old = before if isinstance(codec, RandomK) else torch.zeros_like(before)
    assert torch.equal(residual, torch.where(lost.isfinite(), lost, old))


def test_residual_counts_once_where_a_threshold_is_lowered(target: Target) -> None:
    """The sample has all large elements, so that too few reach the first threshold."""
    n, ratio = 12_288, 0.1
    sample = sampled_runs(n, sample_size(n, 0.01, ratio))
    x, residual = (torch.from_numpy(make("gaussian", n, 1.0, seed)) for seed in range(2))
    x.view(-1, RUN)[sample] *= 1000
    x, residual = x.to(target.device), residual.to(target.device)
    total = residual + x
    sent = decoded(TopK(ratio), TopK(ratio).encode_feedback(x, residual), n)
    assert torch.equal(sent + residual, total)
    assert sent.abs()[sent != 0].min() >= residual.abs().max()


@grid(cover=1, codec=CODECS, many=[False, True])
def test_feedback_keeps_nothing_that_is_not_finite(target: Target, codec: Any, many: bool) -> None:
    x = torch.ones(200, device=target.device)
    x[3 :: 2 if many else 77] = float("inf")
    residual = torch.full((200,), 0.5, device=target.device)
    codec.encode_feedback(x, residual, seed=1)
    if isinstance(codec, RandomK):
        assert (residual == 0.5).all()
    else:
        assert residual.isfinite().all()
        assert (residual[x.isinf()] == 0).all()


@grid(
    side=["vector", "residual"],
    bad=[float("inf"), float("-inf"), float("nan")],
    codec=[*CODECS, RandomK(0.05, unbiased=True), RandomK(0.05, values="absmax_int8")],
    cover=1,
)
def test_what_is_not_finite_arrives_wherever_it_is(target: Target, codec: Any, bad: float, side: str) -> None:
    """At the element itself, whether the seed draws it or not; others' residuals stay, and its own is finite."""
    n = 60
    for place in range(1 if EMULATED else n):
        x, residual = (torch.from_numpy(make("gaussian", n, 1.0, i)).to(target.device) for i in (1, 2))
        (x if side == "vector" else residual)[place] = bad
        total, before = residual + x, residual.clone()
        payloads = [codec.encode(total, seed=place)]
        if not codec.shared_seed or isinstance(codec.bias, Contractive):
            payloads.append(codec.encode_feedback(x, residual, seed=place))
            assert residual.isfinite().all()
            others = torch.arange(n, device=target.device) != place
            if isinstance(codec, RandomK):
                assert torch.equal(residual[others], before[others])
                assert float(residual[place]) == (0 if side == "residual" else before[place])
        for payload in payloads:
            good = codec.encode(torch.ones_like(x), seed=place)
            assert not decoded(codec, payload, n)[place].isfinite()
            for both in (torch.stack([payload, good]), torch.stack([good, payload])):
                for scale in (0.5, 0.0):
                    mean = codec.decode_sum(both, torch.empty(n, device=target.device), scale)
                    assert not mean[place].isfinite()
            if codec.linear:
                codec.summable(good).add_(codec.summable(payload))
                assert not decoded(codec, good, n)[place].isfinite()


@pytest.mark.parametrize(
    "codec", [TopK(0.5, "absmax_int8:block=32"), ThresholdTopK(0.5, values="absmax_int8:block=32")], ids=repr
)
def test_values_beside_one_that_is_not_finite_are_kept(target: Target, codec: Any) -> None:
    """Their block decodes to NaN, so that nothing of them arrives."""
    x = torch.arange(1.0, 41.0, device=target.device)
    x[30] = float("nan")
    residual = torch.full_like(x, 0.25)
    out = decoded(codec, codec.encode_feedback(x, residual), 40)
    assert out.isnan().sum() > 10
    expected = (x + 0.25).masked_fill(x.isnan(), 0.0)
    assert torch.equal(residual, torch.where(out.isnan(), expected, expected - out))


@grid(cover=1, codec=CODECS)
def test_reduce_is_decode_sum_encode(target: Target, codec: Any) -> None:
    n = 65 if EMULATED else 70_001
    inputs = [torch.from_numpy(make("heavy", n, 1.0, r)).to(target.device) for r in range(3)]
    payloads = torch.stack([codec.encode(x, seed=r) for r, x in enumerate(inputs)])
    total = torch.zeros(n, device=target.device)
    for payload in payloads:
        total += decoded(codec, payload, n)
    total *= 1 / 3
    for dtype in DTYPES:
        out = torch.empty(n, dtype=dtype, device=target.device)
        assert torch.equal(codec.decode_sum(payloads, out, 1 / 3), total.to(dtype))
    assert torch.equal(codec.reduce(payloads, n, scale=1 / 3, seed=5), codec.encode(total, seed=5))


def test_indices_above_2_to_24(target: Target) -> None:
    if EMULATED:
        pytest.skip("takes hours here")
    n = 2**24 + 70_000
    x = torch.zeros(n, device=target.device)
    places = [5, 2**24 - 1, 2**24 + 1, 2**24 + 3, n - 1]
    x[places] = torch.arange(1.0, 6.0, device=target.device)
    codec = TopK(5.5 / n)
    out = decoded(codec, codec.encode(x), n)
    assert out.nonzero().view(-1).tolist() == places
    assert torch.equal(out, x)


@given(data=st.data())
def test_damaged_payloads_never_crash(target: Target, data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    n = 100 if EMULATED else 70_001
    good = codec.encode(torch.from_numpy(make("heavy", n, 1.0, 0)).to(target.device), seed=1)
    payload = good.clone()
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, payload.numel() - 1) | st.integers(0, 47))
        payload[at] ^= data.draw(st.integers(1, 255))
    buffer = torch.full((n + 200,), 7.0, device=target.device)
    out = buffer[100 : 100 + n]
    for read in (
        lambda: codec.decode(payload, out),
        lambda: codec.decode_sum(torch.stack([good, payload, good]), out),
    ):
        with contextlib.suppress(ValueError):
            read()
        assert (buffer[:100] == 7).all()
        assert (buffer[100 + n :] == 7).all()


@pytest.mark.parametrize(
    ("at", "message"), [(0, "header counts"), (16, "ends of its chunks"), (33, "offsets in a chunk")]
)
def test_damage_is_named(target: Target, at: int, message: str) -> None:
    good = TopK(0.1).encode(torch.ones(100, device=target.device))
    payload = good.clone()
    payload[at] += 1
    with pytest.raises(ValueError, match=message):
        decoded(TopK(0.1), payload, 100)
    for rows in ([payload, good], [good, payload]):
        with pytest.raises(ValueError, match=message):
            TopK(0.1).decode_sum(torch.stack(rows), torch.empty(100, device=target.device))


def test_ends_that_do_not_ascend_are_named(target: Target) -> None:
    n = 131_073
    good = torch.from_numpy(oracle.payload(np.ones(n, np.float32), np.arange(8), 8)).to(target.device)
    payload = good.clone()
    # The first chunk's end, of three, beyond that of the others.
    payload[16] += 1
    with pytest.raises(ValueError, match="ends of its chunks do not ascend"):
        decoded(TopK(8 / n), payload, n)
    with pytest.raises(ValueError, match="ends of its chunks do not ascend"):
        TopK(8 / n).decode_sum(torch.stack([good, payload]), torch.empty(n, device=target.device))


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_begin_with_zero(target: Target, rows: int) -> None:
    """So that what no rank sent and what they sent as -0 are the same; a negative scale turns both."""
    codec = TopK(1.0)
    payloads = torch.stack([codec.encode(torch.full((5,), -0.0, device=target.device))] * rows)
    for scale in (1.0, -1.0):
        out = codec.decode_sum(payloads, torch.full((5,), 7.0, device=target.device), scale)
        assert same_bits(out.cpu().numpy(), np.full(5, 0.0 * scale, np.float32))


@grid(cover=1, codec=CODECS)
def test_sums_of_nothing(target: Target, codec: Any) -> None:
    for dtype in DTYPES:
        nobody = torch.empty((0, codec.payload_size(50)), dtype=torch.uint8, device=target.device)
        out = codec.decode_sum(nobody, torch.full((50,), 7, dtype=dtype, device=target.device), 0.5)
        assert torch.equal(out, torch.zeros_like(out))
        for rows in (0, 2):
            empty = torch.empty((rows, 0), dtype=torch.uint8, device=target.device)
            assert codec.decode_sum(empty, torch.empty(0, dtype=dtype, device=target.device)).numel() == 0


def test_truncated_payloads_and_arguments() -> None:
    payload = TopK().encode(torch.ones(1000))
    for size in (0, 16, payload.numel() - 16):
        with pytest.raises(ValueError, match="payload must have shape"):
            TopK().decode(payload[:size], torch.empty(1000))
    for ratio in (0, -1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"ratio (of TopK )?must be (above 0|a finite number)"):
            TopK(ratio)
    with pytest.raises(ValueError, match="contractive codec"):
        TopK(values="minmax_uint8:stochastic=true")
    with pytest.raises(ValueError, match="kept exactly"):
        RandomK(unbiased=True, values="minmax_uint8")
    with pytest.raises(TypeError, match="residual must be of dtype float32"):
        TopK().encode_feedback(torch.ones(4), torch.ones(4, dtype=torch.float16))


def test_declarations() -> None:
    assert from_spec("topk:ratio=0.5") == TopK(0.5)
    assert from_spec("threshold_topk:sample=0.1") == ThresholdTopK(sample=0.1)
    assert from_spec("randomk:unbiased=true") == RandomK(unbiased=True)
    assert all(isinstance(codec, Codec) for codec in CODECS)
    assert [codec.shared_seed for codec in CODECS] == [False, False, True, False]
    assert [codec.linear for codec in CODECS] == [False, False, True, False]
    assert kept(0.29, 100) == 29
