"""Vectors of many tensors: what only fills blocks up between them is in no scale and has no residual, on either pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import CompressedAllReduce, OneBitSGD, SignSGD
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import CompressedAllGather, CompressedReduceScatter, all_reduce_for
from bagua_kernels.comm.compressed.layout import own_counts
from bagua_kernels.compression import from_spec
from tests.algorithms.training import Given, follow
from tests.grids import grid, only

SIZES = (5, 64, 70, 1, 33)
SPECS = (
    "sign:block=64",
    "sign:block=64,two_means=true",
    "minmax_uint8:block=64",
    "minmax_uint4:block=64",
)


def bucket() -> Bucket:
    return Bucket([torch.empty(size) for size in SIZES], align=64)


def of_equal_magnitudes(like: Bucket, rank: int) -> torch.Tensor:
    """Each tensor has one magnitude, far from zero and alike in all elements, and NaN is between tensors."""
    x = torch.full_like(like.flat, torch.nan)
    for number, span in enumerate(like.own):
        x[span] = 10.0**number * (rank + 1)
    return x


@grid(cover=1, feedback=[False, True], spec=only(SPECS, "sign:block=64,two_means=true", "minmax_uint8:block=64"))
def test_short_blocks_are_as_exact_as_full_ones(spec: str, feedback: bool) -> None:
    here, ranks = bucket(), 3
    codec = from_spec(spec)

    def rank(communicator: Communicator) -> None:
        n = here.flat.numel()
        residuals: dict[str, Any] = {"worker_residual": feedback, "owner_residual": feedback}
        all_reduce = all_reduce_for(codec, communicator, n, pieces=2, own=here.own, **residuals)
        for seed in range(2):
            x = of_equal_magnitudes(here, communicator.rank)
            all_reduce(x, seed=seed)
            for number, span in enumerate(here.own):
                assert torch.allclose(x[span], torch.tensor(10.0**number * 2), rtol=1e-6)
        # Nothing was lost, and what is between tensors has none.
        for vector in all_reduce.vectors().values():
            assert vector.abs().max() <= 1e-6 * 10.0 ** len(SIZES)
            assert not torch.cat([vector[gap.storage_offset() :][: gap.numel()] for gap in here.gaps]).any()

    run_ranks(ranks, rank)


@grid(cover=1, spec=SPECS[:3])
def test_halves(spec: str) -> None:
    here, codec = bucket(), from_spec(spec)

    def rank(communicator: Communicator) -> None:
        n = here.flat.numel()
        shard = CompressedReduceScatter(codec, communicator, n, own=here.own)(
            of_equal_magnitudes(here, communicator.rank)
        )
        x = CompressedAllGather(codec, communicator, n, own=here.own)(shard)
        for number, span in enumerate(here.own):
            assert torch.allclose(x[span], torch.tensor(10.0**number * 1.5), rtol=1e-6)

    run_ranks(2, rank)


def test_counts() -> None:
    spans = [slice(0, 5), slice(64, 200), slice(256, 256), slice(320, 384)]
    assert own_counts(spans, 390, 64).tolist() == [5, 64, 64, 8, 0, 64, 0]
    for wrong in ([slice(1, 5)], [slice(0, 400)], [slice(0, 70), slice(64, 80)]):
        with pytest.raises(ValueError, match="must begin at multiples of 64"):
            own_counts(wrong, 390, 64)


@pytest.mark.parametrize("kind", [SignSGD, OneBitSGD])
def test_short_tensors_lag_no_more_than_long_ones(kind: type[CompressedAllReduce]) -> None:
    """Gradients of one size each step, of signs that change: a mean magnitude that zeros lowered would lag behind."""
    shapes = {"long": (512,), "short": (7,), "tail": (512 + 3,)}
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, 515)).astype(np.float32)

    def rank(communicator: Communicator) -> None:
        options = {"warmup_steps": 0} if kind is OneBitSGD else {}
        algorithm = kind(Given(shapes), communicator=communicator, exact=(), min_numel=0, **options)
        given = [{name: 3 * s[: shape[0]].copy() for name, shape in shapes.items()} for s in signs]
        for own, mean in zip(given, follow(algorithm, given), strict=True):
            for name in shapes:
                np.testing.assert_allclose(mean[name], own[name], rtol=1e-5)
        assert algorithm.stats().residual_norm < 1e-2
        algorithm.close()

    run_ranks(2, rank)
