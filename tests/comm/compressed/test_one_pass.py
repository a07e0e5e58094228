"""Sparse and linear all-reduce, the choice among all, and every registered codec in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import CompressedAllReduce, LinearAllReduce, SparseAllReduce, all_reduce_for, linear
from bagua_kernels.comm.compressed.linear import check_range
from bagua_kernels.compression import (
    Cast,
    Codec,
    Identity,
    MinMaxUInt8,
    RandomK,
    TernGrad,
    ThresholdTopK,
    TopK,
    from_spec,
)
from bagua_kernels.compression.codec import names
from tests.comm.compressed import simulation
from tests.grids import grid, only
from tests.oracles.vectors import make, same_bits

SEED = 17
LENGTHS = ((0, 1), (1, 1), (63, 2), (65, 1), (5003, 3))


def vectors(n: int, ranks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.from_numpy(make("gaussian", n, 1.0, rank)).to(dtype) for rank in range(ranks)]


def results(codec: Codec, inputs: list[torch.Tensor], pieces: int | None) -> list[torch.Tensor]:
    """What each rank gets, the second time, so that buffers have been used; the exact part is checked."""

    def rank(communicator: Communicator) -> torch.Tensor:
        own = inputs[communicator.rank]
        all_reduce = all_reduce_for(codec, communicator, own.numel(), 2, own.dtype, pieces=pieces)
        all_reduce(own.neg(), torch.zeros(2, dtype=own.dtype), seed=1)
        x, exact = own.clone(), torch.tensor([1.0, communicator.rank]).to(own.dtype)
        all_reduce(x, exact, seed=SEED)
        expected = torch.tensor([1.0, (communicator.size - 1) / 2])
        assert torch.allclose(exact.float(), expected, rtol=0.01)
        return x

    return run_ranks(len(inputs), rank)


def spec_of(name: str) -> str:
    return {"topk": "topk:ratio=0.1", "threshold_topk": "threshold_topk:ratio=0.1", "randomk": "randomk:ratio=0.1"}.get(
        name, name
    )


# One of each kind of payload.
@grid(
    name=only(names(), "absmax_int4", "minmax_uint8", "randomk", "sign", "terngrad", "topk"),
    dtype=[torch.float32, torch.bfloat16],
    cover=1,
)
def test_every_codec(name: str, dtype: torch.dtype) -> None:
    """On all ranks the same bits, and where the codec is no linear one those of the simulation."""
    codec, inputs = from_spec(spec_of(name)), vectors(3001, 3, dtype)
    found = results(codec, inputs, 2)
    assert all(torch.equal(result, found[0]) for result in found)
    if isinstance(codec, (TopK, ThresholdTopK)):
        assert torch.equal(found[0], simulation.sparse(codec, inputs, 2, SEED))
    elif not codec.linear:
        assert torch.equal(found[0], simulation.two_passes(codec, inputs, 2, SEED))


@grid(ranks=[1, 2, 3, 4, 7, 8], codec=[TopK(0.1), ThresholdTopK(0.1), TopK(0.2, "absmax_int8:block=32")], cover=1)
def test_sparse(codec: Codec, ranks: int) -> None:
    for n, pieces in LENGTHS[:: 1 if ranks < 4 else 4]:
        inputs = vectors(n, ranks)
        expected = simulation.sparse(codec, inputs, pieces, SEED) if ranks > 1 else inputs[0]
        for result in results(codec, inputs, pieces):
            assert torch.equal(result, expected)


def test_sparse_is_one_piece_by_default() -> None:
    x = torch.zeros(1 << 20)
    x[:100] = 1 + torch.arange(100)
    (a, b) = results(TopK(100 / (1 << 20)), [x, x], None)
    assert torch.equal(a, x)
    assert torch.equal(b, x)


def mean(inputs: list[torch.Tensor]) -> np.ndarray:
    return np.mean([x.double().numpy() for x in inputs], axis=0)


@grid(cover=1, ranks=[1, 2, 3, 4, 7, 8])
def test_linear_floats(ranks: int) -> None:
    for n, pieces in LENGTHS:
        inputs = vectors(n, ranks)
        for codec, error in ((Identity(), 1e-6), (Cast(), 2**-7), (Cast("float16"), 2**-9)):
            for result in results(codec, inputs, pieces):
                assert np.abs(result.double().numpy() - mean(inputs)).max(initial=0) <= error * 8


def test_linear_randomk_sends_the_same_elements() -> None:
    inputs, codec = vectors(5003, 3), RandomK(0.2)
    found = results(codec, inputs, 1)
    assert all(torch.equal(result, found[0]) for result in found)
    sent = found[0] != 0
    assert sent.sum() == 1000
    assert np.allclose(found[0].numpy()[sent], mean(inputs)[sent], atol=1e-6)
    payload = codec.encode(inputs[0], seed=simulation.seed_1(codec, SEED, 0, 0))
    assert torch.equal(simulation.decoded(codec, payload, inputs[0]) != 0, sent)


@grid(cover=1, ranks=[2, 3, 8])
def test_linear_terngrad(ranks: int) -> None:
    """Codes are added as bytes under the greatest of all ranks' scales."""
    codec, block = TernGrad(64, shared=True), 64
    for n, pieces in LENGTHS:
        inputs = vectors(n, ranks)
        out = np.zeros(n, np.float32)
        for number, _, part in simulation.parts(codec, n, 1, pieces):
            length = part.stop - part.start
            blocks = -(-length // block)
            filled = torch.zeros(ranks, blocks * block)
            filled[:, :length] = torch.stack([x[part] for x in inputs])
            scales = filled.view(ranks, blocks, block).abs().amax((0, 2))
            codes = np.zeros(length, np.int64)
            for rank, x in enumerate(inputs):
                seed = simulation.seed_1(codec, SEED, rank, number)
                payload = codec.encode(x[part], seed=seed, scales=scales.view(torch.int32)).numpy()
                begin = -(-4 * blocks // 16) * 16
                codes += payload[begin : begin + length].view(np.int8)
            sums = codes.astype(np.float32) * scales.numpy().repeat(block)[:length]
            out[part] = sums * np.float32(1 / ranks)
        for result in results(codec, inputs, pieces):
            assert np.array_equal(result.numpy(), out)


def test_not_finite() -> None:
    for codec in (TernGrad(64, shared=True), Identity(), TopK(0.1)):
        inputs = vectors(640, 3)
        inputs[1][70] = float("inf")
        for result in results(codec, inputs, 2):
            assert not result[70].isfinite()
            assert result[128:].isfinite().all()


def test_more_ranks_than_integers_hold_are_refused() -> None:
    check_range(TernGrad(shared=True), 127)
    with pytest.raises(ValueError, match="up to 127 ranks, got 128"):
        check_range(TernGrad(shared=True), 128)


def test_many_ranks_are_not_refused_where_nothing_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(codec: Codec, ranks: int) -> None:
        raise ValueError("too many ranks")

    monkeypatch.setattr(linear, "check_range", refuse)

    def rank(communicator: Communicator) -> None:
        assert LinearAllReduce(TernGrad(shared=True), communicator, 1000, plain_below=1001).plain
        with pytest.raises(ValueError, match="too many ranks"):
            LinearAllReduce(TernGrad(shared=True), communicator, 1000)

    run_ranks(2, rank)


def test_floats_are_decoded_and_not_added_to_zero() -> None:
    """Which would take a pass more, and change the sign of a zero."""
    inputs = [torch.full((100,), -0.0)] * 2
    for codec in (Identity(), Cast(), Cast("float16")):
        for result in results(codec, inputs, 1):
            assert same_bits(result.numpy(), inputs[0].numpy())


def test_the_choice() -> None:
    def rank(communicator: Communicator) -> None:
        def kind(codec: Codec) -> type:
            return type(all_reduce_for(codec, communicator, 1000, worker_residual=False, owner_residual=True))

        assert kind(TopK()) is kind(ThresholdTopK()) is SparseAllReduce
        assert kind(RandomK(values="absmax_int8")) is SparseAllReduce
        assert kind(RandomK()) is kind(TernGrad(shared=True)) is kind(Cast()) is LinearAllReduce
        assert kind(MinMaxUInt8()) is kind(TernGrad()) is CompressedAllReduce
        with pytest.raises(ValueError, match="cannot be added by the network"):
            LinearAllReduce(MinMaxUInt8(), communicator, 1000)

    run_ranks(2, rank)


def test_bytes_on_the_wire() -> None:
    n = 1 << 16

    def rank(communicator: Communicator, codec: Codec) -> int:
        all_reduce_for(codec, communicator, n)(torch.ones(n), seed=1)
        return communicator.bytes_sent

    codec = TopK()
    assert run_ranks(4, rank, codec) == [3 * codec.payload_size(n)] * 4
    assert run_ranks(4, rank, Cast()) == [2 * 3 * 2 * n // 4] * 4
    # The numbers of the payload only, its header not.
    assert run_ranks(4, rank, RandomK()) == [2 * 3 * (RandomK().payload_size(n) - 16) // 4] * 4


def test_random_k_with_encoded_values_shares_seeds() -> None:
    codec, inputs = RandomK(0.2, values="absmax_int8"), vectors(5003, 3)
    found = results(codec, inputs, None)
    assert (found[0] != 0).sum() <= 1000
    assert all(same_bits(result.numpy(), simulation.sparse(codec, inputs, 1, SEED).numpy()) for result in found)
