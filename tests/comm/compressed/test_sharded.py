"""Reduce-scatter and all-gather by themselves, and what makes an all-reduce of the two."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import CompressedAllGather, CompressedAllReduce, CompressedReduceScatter
from bagua_kernels.compression import AbsMaxInt8, Codec, MinMaxUInt8, RandomK, Sign
from tests.comm.compressed import simulation
from tests.grids import grid, only
from tests.oracles.vectors import make

SEED = 5
CODECS = only(
    [MinMaxUInt8(64, True), AbsMaxInt8(64), Sign(64), RandomK(0.3)], MinMaxUInt8(64, True), Sign(64), RandomK(0.3)
)


def vectors(n: int, ranks: int) -> list[torch.Tensor]:
    return [torch.from_numpy(make("heavy", n, 1.0, rank)) for rank in range(ranks)]


@grid(average=[True, False], ranks=[1, 2, 3, 8], codec=CODECS, cover=1)
def test_reduce_scatter(codec: Codec, ranks: int, average: bool) -> None:
    for n, pieces in ((0, 1), (1, 1), (63, 2), (65, 1), (1009, 3)):
        inputs = vectors(n, ranks)

        def rank(communicator: Communicator, n: int, pieces: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            x = inputs[communicator.rank].clone()
            scatter = CompressedReduceScatter(codec, communicator, n, average=average, pieces=pieces)
            shard = scatter(x, seed=SEED)
            assert shard.dtype == torch.float32
            assert torch.equal(x, inputs[communicator.rank])
            assert torch.equal(scatter(x, torch.empty_like(shard), seed=SEED), shard)
            return shard

        expected = inputs[0].clone()
        for number, _, part in simulation.parts(codec, n, ranks, pieces) if ranks > 1 else []:
            total = torch.zeros(part.stop - part.start)
            for payload in simulation.encoded(codec, inputs, part, SEED, number):
                total += simulation.decoded(codec, payload, total)
            expected[part] = total * (1 / ranks if average else 1.0)
        assert torch.equal(torch.cat(run_ranks(ranks, rank, n, pieces, inputs)), expected)


@grid(ranks=[1, 2, 3, 8], codec=CODECS, cover=1)
def test_all_gather(codec: Codec, ranks: int) -> None:
    for n, pieces in ((0, 1), (1, 1), (63, 2), (65, 1), (1009, 3)):
        (x,) = vectors(n, 1)

        def rank(communicator: Communicator, n: int, pieces: int, x: torch.Tensor) -> torch.Tensor:
            gather = CompressedAllGather(codec, communicator, n, pieces=pieces)
            whole = gather(x[gather.shard].clone(), seed=SEED)
            # In place: the own chunk becomes what everyone decodes.
            own = torch.zeros(n)
            own[gather.shard] = x[gather.shard]
            assert torch.equal(gather(own[gather.shard], own, seed=SEED), whole)
            return whole

        expected = x.clone()
        for number, _, part in simulation.parts(codec, n, ranks, pieces) if ranks > 1 else []:
            payload = codec.encode(x[part], seed=simulation.seed_2(codec, SEED, number))
            expected[part] = simulation.decoded(codec, payload, x[part])
        for result in run_ranks(ranks, rank, n, pieces, x):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_vectors(dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        x = torch.linspace(-1, 1, 777).to(dtype)
        scatter = CompressedReduceScatter(MinMaxUInt8(), communicator, 777, dtype)
        shard = scatter(x)
        assert torch.allclose(shard, x[scatter.shard].float(), atol=0.01)
        return CompressedAllGather(MinMaxUInt8(), communicator, 777)(shard, torch.empty_like(x))

    for result in run_ranks(3, rank):
        assert (result.float() - torch.linspace(-1, 1, 777)).abs().max() < 0.02


def test_both_halves_are_the_all_reduce_where_encoding_twice_changes_nothing() -> None:
    """Half-way the all-gather encodes the float32 mean, as the fused `reduce` does; bits are equal."""
    inputs, n = vectors(1009, 3), 1009
    codec = MinMaxUInt8(64, True)

    def rank(communicator: Communicator) -> None:
        x = inputs[communicator.rank].clone()
        shard = CompressedReduceScatter(codec, communicator, n, pieces=2)(x, seed=SEED)
        whole = CompressedAllGather(codec, communicator, n, pieces=2)(shard, seed=SEED)
        CompressedAllReduce(codec, communicator, n, pieces=2)(x, seed=SEED)
        assert torch.equal(x, whole)

    run_ranks(3, rank)


def test_bytes_are_half_of_those_of_the_all_reduce() -> None:
    n = 1 << 16

    def rank(communicator: Communicator) -> tuple[int, ...]:
        counts = []
        for kind in (CompressedReduceScatter, CompressedAllGather, CompressedAllReduce):
            made = kind(MinMaxUInt8(), communicator, n)
            before = communicator.bytes_sent
            made(torch.zeros(n // 4 if kind is CompressedAllGather else n))
            counts.append(communicator.bytes_sent - before)
        return tuple(counts)

    for scatter, gather, both in run_ranks(4, rank):
        assert scatter == gather == both / 2 == 3 * MinMaxUInt8().payload_size(n // 4)
