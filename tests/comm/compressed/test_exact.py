"""The exact part beside payloads: its bytes, its bits, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import DGC, DoubleSqueeze, OneBitSGD, RandomK, SignSGD, TopK
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for
from bagua_kernels.compression import Codec, from_spec
from tests.algorithms.training import Given, draw, follow
from tests.grids import grid, only
from tests.oracles.vectors import make, same_bits

TWO_PASSES, ONE_PASS, SUMMED = "sign", "topk", "randomk"
DTYPES = (torch.float32, torch.bfloat16)


def exact_of(rank: int, exact: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(make("heavy", exact, 1.0, 100 + rank)).to(dtype) if exact else torch.empty(0, dtype=dtype)


def average(
    communicator: Communicator, codec: Codec, n: int, exact: int, dtype: torch.dtype, pieces: int
) -> torch.Tensor:
    """The mean of the exact part, the second time, so that buffers have been used."""
    all_reduce = all_reduce_for(codec, communicator, n, exact, dtype, pieces=pieces)
    part = exact_of(communicator.rank, exact, dtype)
    for seed in (1, 2):
        x = torch.ones(n, dtype=dtype)
        part = exact_of(communicator.rank, exact, dtype) * seed
        all_reduce(x, part, seed=seed)
    return part


@grid(
    ranks=[2, 3, 5],
    spec=only([TWO_PASSES, ONE_PASS, "minmax_uint8", "natural"], TWO_PASSES, ONE_PASS, "minmax_uint8"),
    dtype=DTYPES,
    cover=1,
)
def test_the_mean_is_added_up_in_the_order_of_ranks(ranks: int, spec: str, dtype: torch.dtype) -> None:
    for n, exact, pieces in ((1, 1, 1), (700, 9, 2), (3001, 1000, 3), (64, 20_001, 1)):
        total = np.zeros(exact, np.float32)
        for rank in range(ranks):
            total = total + (exact_of(rank, exact, dtype) * 2).float().numpy()
        expected = torch.from_numpy(total / np.float32(ranks)).to(dtype)
        for found in run_ranks(ranks, average, from_spec(spec), n, exact, dtype, pieces):
            assert same_bits(found.float().numpy(), expected.float().numpy())


def sent(communicator: Communicator, codec: Codec, n: int, exact: int, dtype: torch.dtype) -> int:
    """Bytes of one message."""
    all_reduce = all_reduce_for(codec, communicator, n, exact, dtype)
    before = communicator.bytes_sent
    all_reduce(torch.ones(n, dtype=dtype), torch.ones(exact, dtype=dtype), seed=1)
    return communicator.bytes_sent - before


@grid(ranks=[2, 3, 4, 8], spec=[TWO_PASSES, ONE_PASS, SUMMED], dtype=DTYPES)
def test_bytes_of_the_exact_part(ranks: int, spec: str, dtype: torch.dtype) -> None:
    """Each element twice but for its owner's, and chunks filled up to 16 bytes; sparse payloads save no message for little."""
    codec, n = from_spec(spec), 5000
    without = run_ranks(ranks, sent, codec, n, 0, dtype)
    for exact in (5, 640, 10_007):
        twice = 2 * (ranks - 1) / ranks * exact * dtype.itemsize
        slack = 2 * (ranks - 1) * 16 + (1 << 14 if spec == ONE_PASS else 0)
        for alone, both in zip(without, run_ranks(ranks, sent, codec, n, exact, dtype), strict=True):
            assert twice - 16 <= both - alone <= twice + slack


@pytest.mark.parametrize("kind", only([SignSGD, OneBitSGD, DoubleSqueeze, TopK, RandomK, DGC], OneBitSGD, TopK, DGC))
@pytest.mark.parametrize("ranks", only([2, 4], 2))
def test_bytes_of_an_algorithm_whose_biases_are_exact(kind: type, ranks: int) -> None:
    """As many as twice the biases, and the payload, which does not know of them."""
    shapes = {"matrix": (64, 32), "bias": (20_000,)}
    options = {"warmup_steps": 0} if kind is OneBitSGD else {}

    def rank(communicator: Communicator, names: tuple[str, ...]) -> int:
        some = {name: shapes[name] for name in names}
        algorithm = kind(Given(some), communicator=communicator, **options)
        follow(algorithm, [everyone[communicator.rank] for everyone in draw(some, ranks, 1)])
        before = algorithm.stats().bytes_sent
        follow(algorithm, [everyone[communicator.rank] for everyone in draw(some, ranks, 1)])
        sent = algorithm.stats().bytes_sent - before
        algorithm.close()
        return sent

    together, alone = run_ranks(ranks, rank, ("matrix", "bias")), run_ranks(ranks, rank, ("matrix",))
    biases = 2 * (ranks - 1) / ranks * 20_000 * 4
    for both, one in zip(together, alone, strict=True):
        assert biases * 0.99 <= both - one <= biases * 1.01 + 256
