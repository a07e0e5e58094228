"""The contract of `MinMaxUInt8`: every backend gives the bytes of the wire format, whatever the input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels.compression import Codec, Contractive, MinMaxUInt8, Unbiased, fold_seed, from_spec
from tests.cases import DTYPES, LENGTHS, SHORT_LENGTHS, mixed_bucket
from tests.conftest import EMULATED, Target
from tests.grids import folded, grid, only
from tests.oracles import minmax_uint8 as oracle
from tests.oracles.vectors import KINDS, make, raw_vectors, same_bits, vectors

lengths = SHORT_LENGTHS if EMULATED else LENGTHS
SEED = 0xFEDC_BA98_7654_3210


def vector(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(make("heavy", n, 1e-2, seed)).to(dtype)


def as_float32(x: torch.Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def rounded(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(x).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with NaN equal to NaN."""
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a.cpu(), 3.0), torch.nan_to_num(b.cpu(), 3.0))


@grid(n=lengths, dtype=DTYPES, seed={"nearest": None, "stochastic": SEED})
def test_same_bytes_as_the_oracle(target: Target, n: int, dtype: torch.dtype, seed: int | None) -> None:
    codec = MinMaxUInt8(stochastic=seed is not None)
    x = vector(n, dtype)
    payload = codec.encode(x.to(target.device), seed=seed or 0)
    expected = oracle.encode(as_float32(x), 256, seed)
    assert payload.shape == (codec.payload_size(n),) == expected.shape
    assert np.array_equal(payload.cpu().numpy(), expected)
    out = codec.decode(payload, torch.empty(n, dtype=dtype, device=target.device))
    assert equal(out, rounded(oracle.decode(expected, n), dtype))


@pytest.mark.parametrize("block", only([32, 4096], 32))
def test_other_blocks(target: Target, block: int) -> None:
    codec = MinMaxUInt8(block, stochastic=True)
    n = block + 5 if EMULATED else 4 * 4096 + 5
    x = vector(n, torch.float32)
    payload = codec.encode(x.to(target.device), seed=SEED)
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(x.numpy(), block, SEED))
    out = codec.decode(payload, torch.empty(n, device=target.device))
    assert same_bits(out.cpu().numpy(), oracle.decode(payload.cpu().numpy(), n, block))


@grid(
    n=[1, 257, 1009] if EMULATED else [0, 1, 257, 1009, 150_001],
    ranks=[1, 3],
    seed={"nearest": None, "stochastic": SEED},
    cover=1,
)
def test_reduce_is_decode_sum_encode(target: Target, n: int, ranks: int, seed: int | None) -> None:
    codec = MinMaxUInt8(stochastic=seed is not None)
    inputs = [vector(n, torch.float32, seed=rank) for rank in range(ranks)]
    payloads = torch.stack([codec.encode(x.to(target.device), seed=rank) for rank, x in enumerate(inputs)])
    scale = 1 / 3
    plain = payloads.cpu().numpy()
    reduced = codec.reduce(payloads, n, scale=scale, seed=seed or 0)
    assert np.array_equal(reduced.cpu().numpy(), oracle.reduce(plain, n, scale, 256, seed))
    for dtype in DTYPES:
        total = codec.decode_sum(payloads, torch.empty(n, dtype=dtype, device=target.device), scale)
        assert equal(total, rounded(oracle.decode_sum(plain, n, scale), dtype))


@grid(cover=1, scale=[1e-38, 3e38] if EMULATED else [1e-38, 1e-30, 1.0, 1e30, 3e38])
@folded(kind=KINDS[::3] if EMULATED else KINDS)
def test_kinds_and_scales(target: Target, kind: str, scale: float) -> None:
    n = 300 if EMULATED else 1009
    x = make(kind, n, scale, 5)
    payload = MinMaxUInt8().encode(torch.from_numpy(x).to(target.device))
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(x))
    decoded = MinMaxUInt8().decode(payload, torch.empty(n, device=target.device)).cpu().numpy()
    assert same_bits(decoded, oracle.decode(oracle.encode(x), n))
    assert np.all(np.abs(decoded.astype(np.float64) - x) <= oracle.error_bound(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@folded(bad=[float("-inf"), float("nan")] if EMULATED else [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_non_finite_blocks_decode_to_nan(target: Target, bad: float, dtype: torch.dtype) -> None:
    x = vector(700, dtype)
    x[300] = bad
    codec = MinMaxUInt8()
    payload = codec.encode(x.to(target.device))
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(as_float32(x)))
    out = codec.decode(payload, torch.empty_like(x, device=target.device)).cpu()
    assert out[256:512].isnan().all()
    assert out[:256].isfinite().all()
    assert out[512:].isfinite().all()
    mean = codec.reduce(torch.stack([payload, codec.encode(vector(700, dtype).to(target.device))]), 700, scale=0.5)
    assert codec.decode(mean, torch.empty(700, device=target.device))[256:512].isnan().all()


@given(x=vectors(), seed=st.none() | st.integers(0, 2**64 - 1))
def test_any_vector(target: Target, x: np.ndarray, seed: int | None) -> None:
    codec = MinMaxUInt8(stochastic=seed is not None)
    payload = codec.encode(torch.from_numpy(x).to(target.device), seed=seed or 0)
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(x, 256, seed))
    decoded = codec.decode(payload, torch.empty(x.size, device=target.device)).cpu().numpy()
    assert np.all(np.abs(decoded.astype(np.float64) - x) <= oracle.error_bound(x, stochastic=seed is not None))


@given(x=raw_vectors(allow_nonfinite=True))
def test_any_floats(target: Target, x: np.ndarray) -> None:
    payload = MinMaxUInt8(32).encode(torch.from_numpy(x).to(target.device))
    assert np.array_equal(payload.cpu().numpy(), oracle.encode(x, 32))
    decoded = MinMaxUInt8(32).decode(payload, torch.empty(x.size, device=target.device))
    assert equal(decoded, torch.from_numpy(oracle.decode(payload.cpu().numpy(), x.size, 32)))


@pytest.mark.parametrize(
    ("values", "index"), [((1.5, -253.5), -1), ((1000.0, 1000.001), 256), (tuple(np.linspace(100, 100.001, 50)), -2)]
)
def test_where_baguas_formula_leaves_the_byte(target: Target, values: tuple[float, ...], index: int) -> None:
    x = np.array(values, np.float32)
    assert index in oracle.bagua_formula(x)
    payload = MinMaxUInt8().encode(torch.from_numpy(x).to(target.device))
    decoded = MinMaxUInt8().decode(payload, torch.empty(x.size, device=target.device)).cpu().numpy()
    assert np.all(np.abs(decoded.astype(np.float64) - x) <= oracle.error_bound(x))


@pytest.mark.parametrize("scale", [1e-30, 1e8] if EMULATED else [1e-30, 1e-8, 1e8, 1e30])
def test_scaling_the_input_scales_the_output(target: Target, scale: float) -> None:
    x = torch.from_numpy(make("gaussian", 1000, 1.0, 1)).to(target.device)
    codec = MinMaxUInt8()
    plain = codec.decode(codec.encode(x), torch.empty_like(x)).double()
    scaled = codec.decode(codec.encode(x * scale), torch.empty_like(x)).double()
    assert torch.allclose(scaled / scale, plain, rtol=0, atol=float(x.abs().max()) * 2**-8)
    # Without a level going missing: the error stays that of 256 levels.
    relative = (scaled / scale - x).norm() / x.norm()
    assert relative < 0.01


def test_encoding_again_changes_nothing(target: Target) -> None:
    x = vector(1000, torch.float32).to(target.device)
    codec = MinMaxUInt8()
    payload = codec.encode(x)
    again = codec.encode(codec.decode(payload, torch.empty_like(x)))
    assert torch.equal(payload, again)


def test_accuracy_in_every_layer_of_a_bucket(target: Target) -> None:
    if EMULATED:
        pytest.skip(
            "accuracy is a matter of the bytes, which the other tests compare; 160,000 elements take minutes here"
        )
    codec = MinMaxUInt8()
    x, layers = mixed_bucket(codec.block)
    decoded = codec.decode(codec.encode(x.to(target.device)), torch.empty_like(x, device=target.device)).cpu()
    for layer in layers:
        relative = (decoded[layer] - x[layer]).norm() / x[layer].norm()
        assert relative <= 0.015
    assert codec.payload_size(10**6) / 10**6 <= 1.04


@pytest.mark.parametrize("stochastic", [False, True])
def test_declared_bias_holds_in_the_worst_block(target: Target, stochastic: bool) -> None:
    codec = MinMaxUInt8(256, stochastic)
    x = torch.zeros(256, device=target.device)
    x[0], x[255] = 1.0, -1.0
    trials = 1 if not stochastic else (3 if EMULATED else 200)
    decoded = torch.stack([codec.decode(codec.encode(x, seed=s), torch.empty_like(x)) for s in range(trials)])
    relative = float((decoded - x).square().sum(1).mean() / x.square().sum())
    bound = codec.bias.omega if isinstance(codec.bias, Unbiased) else 1 - codec.bias.delta
    assert 0.9 * bound < relative <= bound * 1.001


def test_bias_is_declared() -> None:
    assert isinstance(MinMaxUInt8().bias, Contractive)
    assert isinstance(MinMaxUInt8(stochastic=True).bias, Unbiased)
    assert isinstance(MinMaxUInt8(), Codec)
    assert not MinMaxUInt8().linear


def test_pieces_of_a_larger_buffer(target: Target) -> None:
    """Encoding from and to slices touches nothing beside them."""
    codec = MinMaxUInt8()
    x = vector(3 * 256 + 40, torch.float32).to(target.device)
    size = codec.payload_size(296)
    buffer = torch.full((size + 32,), 77, dtype=torch.uint8, device=target.device)
    codec.encode(x[256 : 256 + 296], out=buffer[16 : 16 + size])
    assert (buffer[:16] == 77).all()
    assert (buffer[16 + size :] == 77).all()
    assert torch.equal(buffer[16 : 16 + size], codec.encode(x[256 : 256 + 296]))
    out = torch.full((400,), 5.0, device=target.device)
    codec.decode(buffer[16 : 16 + size], out[50 : 50 + 296])
    assert (out[:50] == 5).all()
    assert (out[346:] == 5).all()


class TestArguments:
    """Wrong arguments raise, saying what was got and what was expected."""

    codec = MinMaxUInt8()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
    def test_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=rf"float32, float16, bfloat16, got {dtype}"):
            self.codec.encode(torch.zeros(4, dtype=dtype))

    def test_not_a_tensor(self) -> None:
        with pytest.raises(TypeError, match="must be a tensor, got list"):
            self.codec.encode([1.0, 2.0])  # type: ignore[arg-type]

    def test_shape(self) -> None:
        with pytest.raises(ValueError, match=r"1-D, got shape \(2, 2\)"):
            self.codec.encode(torch.zeros(2, 2))

    def test_stride(self) -> None:
        with pytest.raises(ValueError, match=r"contiguous, got stride \(2,\)"):
            self.codec.encode(torch.zeros(8)[::2])

    def test_payload_of_wrong_size(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(272,\) for n=256 and block=256, got \(271,\)"):
            self.codec.decode(torch.zeros(271, dtype=torch.uint8), torch.empty(256))

    def test_truncated_payloads(self) -> None:
        payload = self.codec.encode(torch.ones(1000))
        for size in (0, 1, payload.numel() - 16, payload.numel() - 1):
            with pytest.raises(ValueError, match="payload must have shape"):
                self.codec.decode(payload[:size], torch.empty(1000))

    def test_payload_of_wrong_dtype(self) -> None:
        with pytest.raises(TypeError, match=r"uint8, got torch\.int8"):
            self.codec.decode(torch.zeros(272, dtype=torch.int8), torch.empty(256))

    def test_unaligned_payload(self) -> None:
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            self.codec.encode(torch.zeros(256), out=torch.zeros(273, dtype=torch.uint8)[1:])

    def test_device(self) -> None:
        with pytest.raises(ValueError, match="must be on cpu, got meta"):
            self.codec.encode(torch.zeros(256), out=torch.zeros(272, dtype=torch.uint8, device="meta"))

    @pytest.mark.parametrize("block", [0, 16, 100, 8192, -256])
    def test_block(self, block: int) -> None:
        with pytest.raises(ValueError, match=f"power of two from 32 to 4096, got block={block}"):
            MinMaxUInt8(block)

    @pytest.mark.parametrize("seed", [-1, 1 << 64])
    def test_seed(self, seed: int) -> None:
        with pytest.raises(ValueError, match=f"got seed={seed}"):
            MinMaxUInt8(stochastic=True).encode(torch.zeros(4), seed=seed)

    def test_reduce_shape(self) -> None:
        with pytest.raises(ValueError, match=r"payloads must have shape \('ranks', 272\)"):
            self.codec.reduce(torch.zeros(272, dtype=torch.uint8), 256)
        with pytest.raises(ValueError, match="n=-1"):
            self.codec.reduce(torch.zeros(2, 0, dtype=torch.uint8), -1)


def test_from_spec() -> None:
    assert from_spec("minmax_uint8") == MinMaxUInt8()
    assert from_spec("minmax_uint8:block=128,stochastic=true") == MinMaxUInt8(128, stochastic=True)
    with pytest.raises(ValueError, match=r"no codec 'minmax'.*known are .*minmax_uint8"):
        from_spec("minmax")
    with pytest.raises(ValueError, match="unexpected keyword argument 'blocks'"):
        from_spec("minmax_uint8:blocks=128")
    with pytest.raises(ValueError, match="expected key=value"):
        from_spec("minmax_uint8:128")


def test_fold_seed_tells_messages_apart() -> None:
    seeds = {
        fold_seed(s, step, bucket, rank)
        for s in (0, 1)
        for step in range(20)
        for bucket in range(5)
        for rank in range(5)
    }
    assert len(seeds) == 2 * 20 * 5 * 5
    assert fold_seed(1, 2) != fold_seed(2, 1)
    # A golden value: every rank must come to the same seed, whatever its version.
    assert fold_seed(0) == 0x6E789E6AA1B965F4
