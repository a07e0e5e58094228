"""The contract of every block codec: the bytes of the wire format from every backend, whatever the input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_kernels.compression import BlockCodec, Codec, Contractive, Sign, TwoMagnitudes, Unbiased
from tests import grids
from tests.cases import DTYPES, LENGTHS, SHORT_LENGTHS
from tests.compression.codecs import ALL, FEW, SAMPLED, STOCHASTIC, Case
from tests.conftest import EMULATED, Target
from tests.grids import folded, grid, only
from tests.oracles import block_quantizers as oracle
from tests.oracles.vectors import KINDS, make, raw_vectors, vectors

SEED = 0xFEDC_BA98_7654_3210
# The simulator takes a second for a few hundred elements: one length with a full and a short block shows the layout.
lengths = {name: SHORT_LENGTHS[name] for name in ("one", "above_block")} if EMULATED else LENGTHS
every_case = grid(cover=1, case=SAMPLED)
one_of_each_kind = grid(cover=1, case=FEW)


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in every bit, with NaN equal to NaN."""
    nan = np.isnan(a) & np.isnan(b)
    return a.dtype == b.dtype and np.array_equal(
        np.where(nan, 0, a).view(np.uint32), np.where(nan, 0, b).view(np.uint32)
    )


def decoded(case: Case, payload: torch.Tensor, n: int) -> np.ndarray:
    return case.codec.decode(payload, torch.empty(n, device=payload.device)).cpu().numpy()


@every_case
@folded(n=lengths)
def test_same_bytes_as_the_oracle(target: Target, case: Case, n: int) -> None:
    # Other dtypes differ in how elements are read and written, which one length shows, and codes of less than a byte;
    # test_minmax_uint8.py has bytes.
    several = n == (1 if EMULATED else 1009) and case in FEW and case.codec.rule.bits < 8
    for dtype in DTYPES if several or grids.EVERYTHING else DTYPES[:1]:
        x = torch.from_numpy(make("heavy", n, 1e-2, 3)).to(dtype) if n else torch.empty(0, dtype=dtype)
        payload = case.codec.encode(x.to(target.device), seed=SEED)
        expected = oracle.encode(case.spec, x.float().numpy(), SEED)
        assert payload.shape == (case.codec.payload_size(n),) == (oracle.payload_size(case.spec, n),)
        assert np.array_equal(payload.cpu().numpy(), expected)
        out = case.codec.decode(payload, torch.empty(n, dtype=dtype, device=target.device))
        values = torch.from_numpy(oracle.decode(case.spec, expected, n)).to(dtype)
        assert equal(out.float().cpu().numpy(), values.float().numpy())


@pytest.mark.skipif(EMULATED, reason="takes hours here")
@grid(cover=1, case=FEW)
def test_millions(target: Target, case: Case) -> None:
    """Beyond the caches, where the CPU writes vectors past them, also from and to memory of odd alignment."""
    n = 2_000_003
    x = torch.from_numpy(make("gaussian", n + 1, 1e-2, 3)).to(target.device)[1:]
    payload = case.codec.encode(x, seed=SEED)
    expected = oracle.encode(case.spec, x.cpu().numpy(), SEED)
    assert np.array_equal(payload.cpu().numpy(), expected)
    values = oracle.decode(case.spec, expected, n)
    assert equal(decoded(case, payload, n), values)
    odd = case.codec.decode(payload, torch.empty(n + 1, device=target.device)[1:])
    assert equal(odd.cpu().numpy(), values)
    if case in ALL[:2]:
        half = case.codec.decode(payload, torch.empty(n, dtype=torch.bfloat16, device=target.device))
        assert torch.equal(half.cpu(), torch.from_numpy(values).bfloat16())
        twice = case.codec.decode_sum(torch.stack([payload, payload]), torch.empty(n, device=target.device), 0.5)
        assert equal(twice.cpu().numpy(), values)


@one_of_each_kind
def test_reduce_and_decode_sum(target: Target, case: Case) -> None:
    n, scale = (300 if EMULATED else 1009), 1 / 3
    inputs = [torch.from_numpy(make("heavy", n, 1e-2, rank)).to(target.device) for rank in range(6)]
    all_payloads = torch.stack([case.codec.encode(x, seed=rank) for rank, x in enumerate(inputs)])
    # The CPU takes four payloads at a time and then one, which kernels of their own do: by default of bytes, and of bits.
    several = not EMULATED and (grids.EVERYTHING or case in (ALL[0], ALL[5]))
    for ranks in (3, 4, 6) if several else (3,):
        payloads = all_payloads[:ranks]
        plain = payloads.cpu().numpy()
        reduced = case.codec.reduce(payloads, n, scale=scale, seed=SEED)
        assert np.array_equal(reduced.cpu().numpy(), oracle.reduce(case.spec, plain, n, scale, SEED))
        total = case.codec.decode_sum(payloads, torch.empty(n, device=target.device), scale)
        assert equal(total.cpu().numpy(), oracle.decode_sum(case.spec, plain, n, scale))


@one_of_each_kind
def test_feedback(target: Target, case: Case) -> None:
    n, factor = (300 if EMULATED else 1009), 0.75
    x = make("gaussian", n, 1e-3, 1)
    x[7] = np.nan
    residual = make("gaussian", n, 1e-4, 2)
    residual[n - 1] = np.inf
    left = torch.from_numpy(residual.copy()).to(target.device)
    payload = case.codec.encode_feedback(torch.from_numpy(x).to(target.device), left, factor=factor, seed=SEED)
    expected, kept = oracle.feedback(case.spec, x, residual, factor, SEED)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert equal(left.cpu().numpy(), kept)


@one_of_each_kind
def test_pieces_are_the_padded_vector(target: Target, case: Case) -> None:
    block = case.codec.block
    sizes = (block + 1, 0, 3, 2 * block) if not EMULATED else (block + 1, 3)
    pieces = [
        torch.from_numpy(make("heavy", size, 1e-2, size)).to(target.device) if size else torch.empty(0)
        for size in sizes
    ]
    flat = torch.cat([torch.nn.functional.pad(p, (0, -p.numel() % block)) for p in pieces])
    counts = [min(block, size - begin) for size in sizes for begin in range(0, size, block)]
    together = case.codec.encode_pieces(pieces, seed=SEED).cpu().numpy()
    assert np.array_equal(together, oracle.encode(case.spec, flat.cpu().numpy(), SEED, counts=counts))


@one_of_each_kind
def test_what_fills_blocks_up_is_not_looked_at(target: Target, case: Case) -> None:
    """Short blocks, one that has nothing of its own, and NaN behind: in no scale, without codes and residuals."""
    block = case.codec.block
    counts = np.array([block - 3, 0, 5] if EMULATED else [block, block - 3, 0, 1, block // 2, 5], np.int32)
    # The last block's end is beyond the vector's.
    n = counts.size * block - 9
    x, y, residual = (make("heavy", n, 1e-2, seed) for seed in range(3))
    own = (np.arange(counts.size * block) % block < counts.repeat(block))[:n]
    x[~own], y[~own] = np.nan, np.inf
    here = torch.from_numpy(counts).to(target.device)
    payload = case.codec.encode(torch.from_numpy(x).to(target.device), seed=SEED, counts=here)
    expected = oracle.encode(case.spec, x, SEED, counts=counts)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert np.isfinite(oracle.decode(case.spec, expected, n)).all()
    left = torch.from_numpy(residual.copy()).to(target.device)
    sent = case.codec.encode_feedback(torch.from_numpy(y).to(target.device), left, seed=SEED, counts=here)
    expected, kept = oracle.feedback(case.spec, y, residual, 1.0, SEED, counts=counts)
    assert np.array_equal(sent.cpu().numpy(), expected)
    assert equal(left.cpu().numpy(), kept)
    assert np.array_equal(kept[~own], residual[~own])
    payloads = torch.stack([payload, sent])
    reduced = case.codec.reduce(payloads, n, scale=0.5, seed=SEED, counts=here)
    assert np.array_equal(
        reduced.cpu().numpy(), oracle.reduce(case.spec, payloads.cpu().numpy(), n, 0.5, SEED, counts=counts)
    )


@every_case
def test_counts_of_any_size_stay_inside(target: Target, case: Case) -> None:
    block = case.codec.block
    x = torch.from_numpy(make("gaussian", block + 7, 1.0, 1)).to(target.device)
    wild = torch.tensor([1 << 30, -5], dtype=torch.int32, device=target.device)
    tame = torch.tensor([block, 0], dtype=torch.int32, device=target.device)
    assert torch.equal(case.codec.encode(x, seed=1, counts=wild), case.codec.encode(x, seed=1, counts=tame))
    for wrong in (tame[:1], tame.long(), tame.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match=r"counts must be contiguous int32 of shape \(2,\)"):
            case.codec.encode(x, seed=1, counts=wrong)


@one_of_each_kind
def test_payloads_with_more_behind_each(target: Target, case: Case) -> None:
    """As they arrive in messages that carry something else, too."""
    n = case.codec.block + 44
    rows = [
        case.codec.encode(torch.from_numpy(make("gaussian", n, 1.0, r)).to(target.device), seed=r) for r in range(3)
    ]
    plain = torch.stack(rows)
    payloads = torch.cat([plain, torch.full_like(plain, 255)[:, :48]], 1)[:, : plain.shape[1]]
    first = case.codec.decode_sum(payloads, torch.empty(n, device=target.device), 0.5)
    assert torch.equal(first, case.codec.decode_sum(plain, torch.empty(n, device=target.device), 0.5))
    assert torch.equal(case.codec.reduce(payloads, n, seed=1), case.codec.reduce(plain, n, seed=1))
    with pytest.raises(ValueError, match="rows that begin at multiples of 16"):
        case.codec.reduce(torch.cat([plain, plain[:, :8]], 1)[:, : plain.shape[1]], n)


@pytest.mark.parametrize("codec", [Sign(), Sign(two_means=True), TwoMagnitudes()], ids=str)
def test_short_blocks_lag_no_more_than_full_ones(target: Target, codec: BlockCodec) -> None:
    """A mean magnitude is that of the block's own elements, so that five equal ones are exact beside a full block."""
    x = torch.zeros(512, device=target.device)
    x[:5], x[256:] = 3.0, 3.0
    counts = torch.tensor([5, 256], dtype=torch.int32, device=target.device)
    residual = torch.zeros_like(x)
    out = codec.decode(codec.encode_feedback(x, residual, counts=counts), torch.empty_like(x))
    assert (out[:5] == 3).all()
    assert (out[256:] == 3).all()
    assert not residual.any()


@grid(kind=["zeros", "mixed_scales"] if EMULATED else KINDS, case=SAMPLED, cover=1)
def test_kinds_and_scales(target: Target, case: Case, kind: str) -> None:
    n = 150 if EMULATED else 1009
    for scale in (1e-30,) if EMULATED else (1e-38, 1e-30, 1.0, 1e30, 3e38):
        x = make(kind, n, scale, 5)
        payload = case.codec.encode(torch.from_numpy(x).to(target.device), seed=SEED)
        expected = oracle.encode(case.spec, x, SEED)
        assert np.array_equal(payload.cpu().numpy(), expected)
        assert equal(decoded(case, payload, n), oracle.decode(case.spec, expected, n))


@every_case
@folded(bad=[float("inf"), float("-inf"), float("nan")])
def test_non_finite_blocks_decode_to_nan(target: Target, case: Case, bad: float) -> None:
    block = case.codec.block
    x = torch.from_numpy(make("gaussian", 2 * block + 9, 1.0, 4))
    x[block + 5] = bad
    payload = case.codec.encode(x.to(target.device))
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(case.spec, x.numpy()))
    out = decoded(case, payload, x.numel())
    assert np.isnan(out[block : 2 * block]).all()
    assert np.isfinite(out[:block]).all()
    assert np.isfinite(out[2 * block :]).all()


@every_case
@given(x=vectors() | raw_vectors(allow_nonfinite=True), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=2 if EMULATED else 50 if grids.EVERYTHING else 10)
def test_any_vector(target: Target, case: Case, x: np.ndarray, seed: int) -> None:
    payload = case.codec.encode(torch.from_numpy(x).to(target.device), seed=seed)
    expected = oracle.encode(case.spec, x, seed)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert equal(decoded(case, payload, x.size), oracle.decode(case.spec, expected, x.size))


@every_case
@given(data=st.data())
@settings(max_examples=3 if EMULATED else 25 if grids.EVERYTHING else 8)
def test_any_bytes_decode(target: Target, case: Case, data: st.DataObject) -> None:
    """Whatever the bytes, decoding ends, writes every element, and writes nothing beside them."""
    n = data.draw(st.integers(1, 300))
    size = case.codec.payload_size(n)
    content = data.draw(st.binary(min_size=size, max_size=size))
    payload = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().to(target.device)
    guarded = torch.full((n + 32,), 5.0, device=target.device)
    case.codec.decode(payload, guarded[16 : 16 + n])
    assert (guarded[:16] == 5).all()
    assert (guarded[16 + n :] == 5).all()
    for wrong in (size - 1, size - 16, size + 16):
        if wrong > 0:
            with pytest.raises(ValueError, match="payload must have shape"):
                case.codec.decode(torch.zeros(wrong, dtype=torch.uint8), torch.empty(n))


def draws(case: Case, x: torch.Tensor, count: int) -> torch.Tensor:
    """Decoded payloads of `count` seeds, float64, [count, n]."""
    out = torch.empty_like(x)
    return torch.stack([case.codec.decode(case.codec.encode(x, seed=seed), out).double() for seed in range(count)])


@pytest.mark.slow
@pytest.mark.skipif(EMULATED, reason="a statistic of the bytes, which other tests compare with the native ones")
@grid(kind=["gaussian", "heavy"], case=only(STOCHASTIC, *(case for case in STOCHASTIC if case in SAMPLED)), cover=1)
def test_unbiased(target: Target, case: Case, kind: str) -> None:
    """The U statistic: N |mean - v|^2 / E |C(v) - v|^2 is 1 for an unbiased codec, N and more times that for a biased one."""
    count = 400
    x = torch.from_numpy(make("gaussian", 4096, 1.0, 11)).to(target.device)
    if kind == "heavy":
        x = x * x.abs().exp()
    errors = draws(case, x, count) - x
    variances = errors.square().mean(0)
    u = count * errors.mean(0).square().sum() / variances.sum()
    # U has mean 1 and, for d independent elements of equal variance, a standard deviation of sqrt(2 / d).
    independent = variances.sum().square() / variances.square().sum()
    assert abs(float(u) - 1) < 5 * float(2 / independent) ** 0.5 + 0.01


@pytest.mark.skipif(EMULATED, reason="a statistic of the bytes, which other tests compare with the native ones")
@grid(
    kind=["gaussian", "heavy", "constant", "one_hot", "subnormal", "offset", "mixed_scales", "worst"],
    case=SAMPLED,
    cover=1,
)
def test_declared_bias_holds(target: Target, case: Case, kind: str) -> None:
    block = case.codec.block
    if kind == "worst":
        # One great value, and others half a step from zero.
        x = torch.full((block,), 0.5 / max(case.spec.levels or 2 ** (case.spec.bits - 1) - 1, 1))
        x[0] = 1.0
    else:
        x = torch.from_numpy(make(kind, 8 * block, 1.0, 2))
    x = x.to(target.device)
    values = draws(case, x, 200 if case.codec.stochastic else 1)
    error = (values - x).square().sum(1).mean()
    bias = case.codec.bias
    assert isinstance(bias, Unbiased if case.codec.stochastic else Contractive)
    bound = bias.omega if isinstance(bias, Unbiased) else 1 - bias.delta
    # The bound is for exact arithmetic; float32's adds the square of a few units in the last place.
    slack = 1.001 if not case.codec.stochastic else 1.05
    norm = x.double().square().sum()
    # Magnitudes below the grid of float32, or of the bfloat16 that `TwoMagnitudes` sends, are lost.
    grid = x.numel() * (2.0**-133 if case.spec.kind == "magnitudes" else 2.0**-148) ** 2
    assert float(error) <= slack * bound * float(norm) + 2.0**-40 * float(norm) + grid


@every_case
def test_is_a_codec(case: Case) -> None:
    assert isinstance(case.codec, Codec)
    assert not case.codec.linear
    assert case.codec.payload_size(0) == 0
    with pytest.raises(ValueError, match="n=-1"):
        case.codec.payload_size(-1)
    assert hash(case.codec) == hash(case.codec)
