"""All-reduces that are given tensors where they are, instead of one vector."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import CompressedAllReduce, LinearAllReduce, SparseAllReduce
from bagua_kernels.compression import QSGD, AbsMaxInt4, Cast, MinMaxUInt8, TopK
from bagua_kernels.compression.block import BlockCodec
from tests.grids import grid

# The first and the last are cut by pieces, the second is smaller than a block.
SHAPES = [(70, 41), (5,), (64,), (33, 3), (90, 90)]


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@grid(
    size=[2, 3],
    pieces=[1, 4],
    dtype=[torch.float32, torch.bfloat16],
    codec=[AbsMaxInt4(block=128), MinMaxUInt8(), QSGD(block=32)],
    cover=1,
)
def test_lent_tensors_have_the_bytes_of_a_filled_bucket(
    codec: BlockCodec, dtype: torch.dtype, pieces: int, size: int
) -> None:
    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        given = tensors(communicator.rank, dtype)
        found = []
        for lent in (set(), {0, 1, 2, 3, 4}, {1, 4}):
            bucket = Bucket(given, align=codec.block)
            # What is left of the step before is nobody's business.
            bucket.whole.fill_(77.0)
            for slot, tensor in enumerate(given):
                if slot in lent:
                    assert bucket.lend(slot, tensor)
                else:
                    bucket.fill(slot, tensor)
            n = bucket.flat.numel()
            reduce = CompressedAllReduce(codec, communicator, n, dtype=dtype, pieces=pieces, own=bucket.own)
            assert (reduce.layout.pieces > 1) == (pieces > 1)
            reduce(bucket.flat, seed=3, source=bucket.pieces if lent else None)
            found.append([view.clone() for view in bucket.views])
        return found

    results = run_ranks(size, rank)
    expected = results[0][0]
    assert all(torch.equal(a, b) for ways in results for way in ways for a, b in zip(way, expected, strict=True))
    mean = sum(torch.stack([t.float().mean() for t in tensors(r, dtype)]) for r in range(size)) / size
    assert torch.allclose(torch.stack([view.float().mean() for view in expected]), mean, atol=0.3)


def test_what_is_lent_stands_for_its_view() -> None:
    first, second = torch.randn(4, 3), torch.randn(5)
    bucket = Bucket([first, second], align=8)
    assert bucket.lend(0, first)
    assert bucket.sources()[0].data_ptr() == first.data_ptr()
    assert bucket.sources()[1] is bucket.views[1]
    assert torch.equal(bucket.pieces(slice(8, 16))[0], first.flatten()[8:])
    bucket.collect([1])
    assert 0 in bucket.lent
    bucket.collect()
    assert not bucket.lent
    assert torch.equal(bucket.views[0], first)
    # Whatever is filled in is newer.
    assert bucket.lend(0, first)
    bucket.fill(0, None)
    assert not bucket.lent
    assert not bucket.views[0].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(4, 3, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.bfloat16),
        torch.randn(3, 4),
        torch._neg_view(torch.randn(4, 3)),
        torch._efficientzerotensor((4, 3)),
    ],
    ids=["strides", "float64", "bfloat16", "shape", "negated", "zeros without memory"],
)
def test_what_cannot_be_read_by_address_is_not_lent(tensor: torch.Tensor) -> None:
    bucket = Bucket([torch.randn(4, 3)], align=8)
    assert not bucket.lend(0, tensor)
    assert not bucket.lent


def test_who_reads_one_vector_says_so() -> None:
    def rank(communicator: Communicator) -> None:
        made = [
            CompressedAllReduce(MinMaxUInt8(), communicator, 512, worker_residual=True),
            CompressedAllReduce(MinMaxUInt8(), communicator, 512, plain_below=1000),
            SparseAllReduce(TopK(0.1), communicator, 512),
            LinearAllReduce(Cast("float16"), communicator, 512),
        ]
        for reduce in made:
            assert not reduce.reads_pieces
            with pytest.raises(ValueError, match="source"):
                reduce(torch.zeros(512), seed=0, source=lambda part: [])

    run_ranks(2, rank)
