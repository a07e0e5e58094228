"""Compressed all-reduce gives, on every rank, the bytes that its steps say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import FIRST_PASS, SECOND_PASS, CompressedAllReduce
from bagua_kernels.compression import MinMaxUInt8, fold_seed
from tests.oracles import minmax_uint8 as oracle
from tests.oracles.vectors import make, same_bits

SEED = 99


def chunk_bounds(n: int, ranks: int, block: int) -> list[tuple[int, int]]:
    blocks = -(-n // block)
    chunk = -(-blocks // ranks) * block
    return [(min(r * chunk, n), min((r + 1) * chunk, n)) for r in range(ranks)]


def expected(inputs: list[np.ndarray], block: int, stochastic: bool) -> np.ndarray:
    """The algorithm's steps on the oracle, rank by rank."""
    ranks, n = len(inputs), inputs[0].size
    out = np.empty(n, np.float32)
    for owner, (begin, end) in enumerate(chunk_bounds(n, ranks, block)):
        seeds = [fold_seed(SEED, FIRST_PASS, rank, owner) if stochastic else None for rank in range(ranks)]
        payloads = np.stack([oracle.encode(x[begin:end], block, s) for x, s in zip(inputs, seeds, strict=True)])
        seed = fold_seed(SEED, SECOND_PASS, owner) if stochastic else None
        mean = oracle.reduce(payloads, end - begin, 1 / ranks, block, seed)
        out[begin:end] = oracle.decode(mean, end - begin, block)
    return out


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 64, 65, 1009, 20_011])
def test_against_the_oracle(n: int, ranks: int, stochastic: bool) -> None:
    block = 64
    inputs = [make("heavy", n, 1e-3, rank) for rank in range(ranks)]
    flags = [np.arange(5, dtype=np.float32) * rank for rank in range(ranks)]

    def rank(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        x = torch.from_numpy(inputs[communicator.rank].copy())
        exact = torch.from_numpy(flags[communicator.rank].copy())
        all_reduce = CompressedAllReduce(MinMaxUInt8(block, stochastic), communicator, n, 5, torch.float32)
        all_reduce(x, exact, seed=SEED)
        first = x.clone()
        # Buffers are used again: a second call must not see the first.
        x.copy_(torch.from_numpy(inputs[communicator.rank]))
        all_reduce(x, torch.from_numpy(flags[communicator.rank].copy()), seed=SEED)
        assert torch.equal(torch.nan_to_num(first), torch.nan_to_num(x))
        return first.numpy(), exact.numpy()

    reference = expected(inputs, block, stochastic)
    for result, exact in run_ranks(ranks, rank):
        assert same_bits(result, reference)
        assert np.array_equal(exact, np.sum(flags, axis=0, dtype=np.float32) / np.float32(ranks))


def test_one_rank_is_the_identity() -> None:
    def rank(communicator: Communicator) -> np.ndarray:
        x = torch.from_numpy(make("heavy", 1000, 1.0, 0))
        CompressedAllReduce(MinMaxUInt8(), communicator, 1000, 0, torch.float32)(x, x[:0])
        return x.numpy()

    (result,) = run_ranks(1, rank)
    assert same_bits(result, make("heavy", 1000, 1.0, 0))


def test_nothing_exact() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        x = torch.full((300,), float(communicator.rank))
        CompressedAllReduce(MinMaxUInt8(), communicator, 300, 0, torch.float32)(x, x[:0])
        return x

    for result in run_ranks(2, rank):
        assert torch.equal(result, torch.full((300,), 0.5))
