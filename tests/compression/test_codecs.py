"""What codecs promise beyond their bytes: accuracy per layer, specs, sums by the network, an optimizer step on the way."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bagua_kernels.compression import (
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    Cast,
    Codec,
    Identity,
    MinMaxUInt2,
    MinMaxUInt4,
    MinMaxUInt8,
    Sign,
    TernGrad,
    from_spec,
)
from bagua_kernels.compression.codec import Summable, names
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.optimizers import ADAM, SGD
from tests.cases import DTYPES, LENGTHS, mixed_bucket
from tests.conftest import EMULATED, Target
from tests.grids import folded, grid, only
from tests.oracles.vectors import make


def vector(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(make("gaussian", n, 1e-2, seed)).to(dtype) if n else torch.empty(0, dtype=dtype)


@grid(
    cover=1,
    codec__error__cost=[
        (AbsMaxInt8(), 0.015, 1.02),
        (MinMaxUInt8(), 0.015, 1.04),
        (AbsMaxInt4(), 0.20, 0.54),
        (MinMaxUInt4(), 0.20, 0.54),
    ],
)
def test_accuracy_in_every_layer_of_a_bucket(codec: AbsMaxInt8 | MinMaxUInt8, error: float, cost: float) -> None:
    x, layers = mixed_bucket(256)
    decoded = codec.decode(codec.encode(x), torch.empty_like(x))
    for layer in layers:
        assert (decoded[layer] - x[layer]).norm() <= error * x[layer].norm()
    # Where pads to 16 bytes and a last, short block do not count any more.
    for n in (50_001, 100_003, 2**20, 10**7 + 1):
        assert codec.payload_size(n) <= cost * n


@grid(cover=1, name=names())
def test_every_name_makes_a_codec_that_works(name: str) -> None:
    codec = from_spec(name)
    assert isinstance(codec, Codec)
    assert from_spec(name) == codec
    assert hash(from_spec(name)) == hash(codec)
    x = vector(5000, 1)
    payload = codec.encode(x, seed=3)
    assert payload.numel() == codec.payload_size(5000)
    assert payload.numel() % 16 == 0
    assert codec.decode(payload, torch.empty_like(x)).isfinite().all()


def test_specs() -> None:
    assert from_spec("qsgd:bits=4,block=128") == QSGD(levels=7, block=128) == QSGD()
    assert from_spec("qsgd:levels=5,norm=l2") == QSGD(levels=5, norm="l2")
    assert from_spec("cast:dtype=float16") == Cast("float16")
    assert from_spec("sign:two_means=true,block=64") == Sign(64, two_means=True)
    wrong = (
        "qsgd:bits=3",
        "qsgd:bits=8,levels=7",
        "qsgd:levels=128",
        "qsgd:levels=7.5",
        "qsgd:norm=l1",
        "fp8:format=e3m4",
    )
    for spec in (
        *wrong,
        "cast:dtype=int8",
        "sign:block=abc",
        "sign:block=64,block=32",
        "sign:two_means=off",
        "topk:values=5",
    ):
        with pytest.raises(ValueError, match=r"got|must be|given twice"):
            from_spec(spec)


def test_equal_descriptions_are_equal_codecs() -> None:
    codec = QSGD(bits=4)
    assert dataclasses.replace(codec, block=256) == QSGD(levels=7, block=256)
    assert eval(repr(codec)) == codec
    with pytest.raises(ValueError, match="got bits=8, levels=7"):
        QSGD(bits=8, levels=7)


def test_bfloat16_is_within_its_bound() -> None:
    """Half-way between two neighbours above a power of two the relative error is greatest."""
    x = torch.full((64,), 1 + 2.0**-8)
    error = Cast().decode(Cast().encode(x), torch.empty_like(x)) - x
    relative = float(error.square().sum() / x.square().sum())
    assert 0.98 * (1 - Cast().bias.delta) < relative <= 1 - Cast().bias.delta


def test_what_is_no_contraction_is_refused() -> None:
    with pytest.raises(ValueError, match="no contraction at block=256"):
        MinMaxUInt2(stochastic=False)
    with pytest.raises(ValueError, match="no contraction at block=512"):
        MinMaxUInt4(512)
    assert MinMaxUInt4(512, stochastic=True).block == 512


class TestSharedScales:
    """TernGrad whose codes the network adds up."""

    codec = TernGrad(block=64, shared=True)

    @pytest.mark.parametrize("n", [1, 64, 300])
    def test_the_sum_of_codes_is_the_sum_of_vectors(self, target: Target, n: int) -> None:
        inputs = [vector(n, rank).to(target.device) * (rank + 1) for rank in range(3)]
        scales = torch.stack([self.codec.scales(x) for x in inputs]).amax(0)
        payloads = [self.codec.encode(x, seed=rank, scales=scales) for rank, x in enumerate(inputs)]
        alone = [self.codec.decode(p, torch.empty(n, device=target.device)) for p in payloads]
        expected = scales.view(torch.float32).repeat_interleave(64)[:n]
        for x, values in zip(inputs, alone, strict=True):
            codes = values / expected
            assert ((codes == 0) | (codes == x.sign())).all()
        total = payloads[0].clone()
        for payload in payloads[1:]:
            self.codec.summable(total).add_(self.codec.summable(payload))
        summed = self.codec.decode(total, torch.empty(n, device=target.device))
        codes = sum((values / expected).round() for values in alone)
        assert torch.equal(summed, codes * expected)
        assert (self.codec.summable(total).view(torch.uint8)[n:] == 0).all()

    def test_unbiased(self) -> None:
        x = vector(4096, 5)
        scales = self.codec.scales(x)
        draws = torch.stack(
            [self.codec.decode(self.codec.encode(x, seed=s, scales=scales), torch.empty_like(x)) for s in range(400)]
        )
        errors = (draws - x).double()
        u = 400 * errors.mean(0).square().sum() / errors.square().sum(1).mean()
        assert 0.85 < float(u) < 1.20

    def test_own_scales_are_the_default(self) -> None:
        x = vector(200, 1)
        assert torch.equal(self.codec.encode(x, seed=1), self.codec.encode(x, seed=1, scales=self.codec.scales(x)))
        own = TernGrad(block=64)
        assert torch.equal(
            own.decode(own.encode(x, seed=1), torch.empty_like(x)),
            self.codec.decode(self.codec.encode(x, seed=1), torch.empty_like(x)),
        )

    def test_non_finite(self) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            x = vector(200, 1)
            x[70] = bad
            scales = self.codec.scales(x)
            assert scales.tolist()[1] == 0x7FC00000
            decoded = self.codec.decode(self.codec.encode(x, scales=scales), torch.empty_like(x))
            assert decoded[64:128].isnan().all()
            assert decoded[:64].isfinite().all()

    def test_paths_that_would_use_own_scales(self) -> None:
        with pytest.raises(ValueError, match="shared"):
            self.codec.encode_pieces([torch.ones(3)])
        with pytest.raises(ValueError, match="shared"):
            self.codec.encode_feedback(torch.ones(3), torch.zeros(3))

    def test_an_infinite_scale(self, target: Target) -> None:
        x = torch.tensor([float("inf"), 1.0, -1.0, float("nan"), -float("inf")], device=target.device)
        scales = torch.tensor([0x7F800000], dtype=torch.int32, device=target.device)
        payload = self.codec.encode(x, scales=scales)
        assert not self.codec.summable(payload).any()
        assert self.codec.decode(payload, torch.empty_like(x)).isnan().all()

    def test_wrong_arguments(self) -> None:
        x = vector(200, 1)
        with pytest.raises(ValueError, match=r"scales must be int32 of shape \(4,\)"):
            self.codec.encode(x, scales=torch.zeros(3, dtype=torch.int32))
        with pytest.raises(ValueError, match="with shared=False"):
            TernGrad().encode(x, scales=torch.zeros(1, dtype=torch.int32))
        with pytest.raises(ValueError, match="cannot be added"):
            TernGrad().summable(TernGrad().encode(x))
        with pytest.raises(ValueError, match="no vector has a payload of 16 bytes"):
            self.codec.summable(torch.zeros(16, dtype=torch.uint8))
        for n in range(1, 2000, 7):
            assert self.codec.summable(self.codec.encode(torch.ones(n))).numel() == -(-n // 16) * 16


class TestCasts:
    @pytest.mark.parametrize("codec", [Identity(), Cast(), Cast("float16")], ids=str)
    @folded(n=LENGTHS, dtype=DTYPES)
    def test_values_are_those_of_the_dtype(self, codec: Identity | Cast, dtype: torch.dtype, n: int) -> None:
        x = vector(n, 1, dtype)
        payload = codec.encode(x)
        assert payload.numel() == codec.payload_size(n)
        assert not payload[n * codec.stored.itemsize :].any()
        assert torch.equal(codec.decode(payload, torch.empty_like(x)), x.to(codec.stored).to(dtype))

    def test_sums(self) -> None:
        for codec in (Identity(), Cast(), Cast("float16")):
            inputs = [vector(1000, rank) for rank in range(3)]
            payloads = torch.stack([codec.encode(x) for x in inputs])
            expected = (sum(x.to(codec.stored).float() for x in inputs) * torch.tensor(1 / 3)).float()
            assert torch.equal(codec.decode_sum(payloads, torch.empty(1000), 1 / 3), expected)
            assert torch.equal(codec.reduce(payloads, 1000, scale=1 / 3), codec.encode(expected))
            total = payloads[0].clone()
            codec.summable(total).add_(codec.summable(payloads[1]))
            two = (inputs[0].to(codec.stored) + inputs[1].to(codec.stored)).float()
            assert torch.equal(codec.decode(total, torch.empty(1000)), two)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="payload must have shape"):
            Cast().decode(torch.zeros(15, dtype=torch.uint8), torch.empty(8))
        with pytest.raises(TypeError, match="float64"):
            Cast().encode(torch.zeros(3, dtype=torch.float64))
        with pytest.raises(ValueError, match="n=-1"):
            Identity().payload_size(-1)


@grid(
    update={update.name: update for update in [SGD, ADAM]},
    dtype=DTYPES,
    codec=[AbsMaxInt8(), AbsMaxInt4(), Sign(64, two_means=True)],
    cover=1,
)
def test_decode_and_apply_is_both_in_turn(
    target: Target, codec: AbsMaxInt8, dtype: torch.dtype, update: object
) -> None:
    n = 150 if EMULATED else 40_000
    payloads = torch.stack([codec.encode(vector(n, rank).to(target.device)) for rank in range(3)])
    scalars = (0.1, 0.9, 1.0, 0.01, 1.0) if update is SGD else (0.0, 0.999, 0.1, 0.999, 0.001, 1e-8, 1e-3, 0.9)
    assert update in (SGD, ADAM)
    rule = SGD if update is SGD else ADAM
    states = [vector(n, 10 + i, dtype).abs().to(target.device) for i in range(rule.arrays - 1)]
    together = [s.clone() for s in states]
    codec.decode_apply(payloads, rule, together, scalars, scale=1 / 3)
    gradient = codec.decode_sum(payloads, torch.empty(n, device=target.device), 1 / 3)
    elementwise.apply(rule, (states[0], gradient, *states[1:]), scalars)
    for one, other in zip(together, states, strict=True):
        assert torch.equal(one, other)


@grid(
    cover=1,
    ranks=[1, 3],
    codec=only([AbsMaxInt8(), AbsMaxInt4(), Sign(64, two_means=True)], AbsMaxInt8(), AbsMaxInt4()),
)
def test_decode_and_apply_to_a_part_is_that_part(target: Target, codec: AbsMaxInt8, ranks: int) -> None:
    n, first = 5 * codec.block + 7, 2
    payloads = torch.stack([codec.encode(vector(n, rank).to(target.device)) for rank in range(ranks)])
    whole = [vector(n, 10 + i).to(target.device) for i in range(SGD.arrays - 1)]
    begin = first * codec.block
    for end in (n,) if EMULATED else (begin + codec.block + 9, n):
        part = [x[begin:end].clone() for x in whole]
        codec.decode_apply(payloads, SGD, part, (0.1, 0.9, 1.0, 0.01, 1.0), first=first, total=n)
        expected = [x.clone() for x in whole]
        codec.decode_apply(payloads, SGD, expected, (0.1, 0.9, 1.0, 0.01, 1.0))
        for one, other in zip(part, expected, strict=True):
            assert torch.equal(one, other[begin:end])
    with pytest.raises(ValueError, match="do not hold"):
        codec.decode_apply(payloads, SGD, whole, (0.1, 0.9, 1.0, 0.01, 1.0), first=1, total=n)


def test_decode_and_apply_checks_its_arguments() -> None:
    codec, n = AbsMaxInt8(), 256
    payloads = codec.encode(torch.ones(n))[None]
    state = [torch.zeros(n), torch.zeros(n)]
    with pytest.raises(ValueError, match="takes 2 arrays beside the gradient, got 1"):
        codec.decode_apply(payloads, SGD, state[:1], (0.1, 0.9, 1.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"array 1 must have shape \(256,\)"):
        codec.decode_apply(payloads, SGD, [state[0], torch.zeros(n + 1)], (0.1, 0.9, 1.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="takes 5 scalars, got 1"):
        codec.decode_apply(payloads, SGD, state, (0.1,))
    with pytest.raises(ValueError, match="payloads must have shape"):
        codec.decode_apply(payloads[0], SGD, state, (0.1, 0.9, 1.0, 0.0, 0.0))


EVERY = [
    *names(),
    *("cast:dtype=float16", "terngrad:shared=true", "sign:two_means=true", "qsgd:norm=l2", "fp8:format=e5m2"),
    *("randomk:unbiased=true", "randomk:values=cast", "topk:values=absmax_int8", "threshold_topk:values=identity"),
]


@grid(cover=1, spec=EVERY)
@folded(ranks=[0, 1, 2, 3])
def test_vectors_of_no_elements(target: Target, spec: str, ranks: int) -> None:
    codec, empty = from_spec(spec), torch.empty(0, device=target.device)
    alone = codec.encode(empty, seed=1)
    assert alone.shape == (0,)
    payloads = torch.stack([alone] * ranks) if ranks else alone.view(0, 0)
    for dtype in DTYPES:
        out = empty.to(dtype)
        assert codec.decode_sum(payloads, out, 1 / 3) is out
        for payload in payloads:
            assert codec.decode(payload, out) is out
    assert codec.reduce(payloads, 0, scale=1 / 3, seed=1).shape == (0,)
    if codec.linear:
        assert isinstance(codec, Summable)
        for payload in payloads:
            assert codec.summable(payload).numel() == 0
