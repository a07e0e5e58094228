"""The collectives where messages are as late as they may be, and over sockets: no buffer is used again too early."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.compressed import CompressedAllGather, CompressedReduceScatter, all_reduce_for, phases
from bagua_kernels.compression import Cast, Codec, MinMaxUInt8, RandomK, TernGrad, TopK
from tests.comm.compressed import simulation
from tests.comm.compressed.lazy import make_late
from tests.grids import grid
from tests.oracles.vectors import make

SEED, N, PIECES = 7, 5003, 4
TWO_PASSES = [MinMaxUInt8(64, True), TernGrad(64)]
ONE_PASS = [TopK(0.1), RandomK(0.2, values="absmax_int8")]
LINEAR = [Cast(), RandomK(0.2), TernGrad(64, shared=True)]


def vectors(ranks: int) -> list[torch.Tensor]:
    return [torch.from_numpy(make("gaussian", N, 1.0, rank)) for rank in range(ranks)]


def all_reduced(communicator: Communicator, codec: Codec, own: torch.Tensor) -> torch.Tensor:
    """What a rank gets the second time, so that buffers have been used; the exact part is checked."""
    all_reduce = all_reduce_for(codec, communicator, N, 2, pieces=PIECES)
    all_reduce(own.neg(), torch.zeros(2), seed=1)
    x, exact = own.clone(), torch.tensor([1.0, communicator.rank])
    all_reduce(x, exact, seed=SEED)
    assert torch.equal(exact, torch.tensor([1.0, (communicator.size - 1) / 2]))
    return x


def expected(codec: Codec, inputs: list[torch.Tensor]) -> torch.Tensor:
    simulated = simulation.two_passes if codec in TWO_PASSES else simulation.sparse
    return simulated(codec, inputs, PIECES, SEED)


@grid(cover=1, ranks=[2, 3], codec=TWO_PASSES + ONE_PASS)
def test_all_reduce(codec: Codec, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = vectors(ranks)
    make_late(monkeypatch)
    for result in run_ranks(ranks, lambda c: all_reduced(c, codec, inputs[c.rank])):
        assert torch.equal(result, expected(codec, inputs))


@pytest.mark.parametrize("codec", LINEAR, ids=repr)
def test_linear_all_reduce(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = vectors(3)
    at_once = run_ranks(3, lambda c: all_reduced(c, codec, inputs[c.rank]))
    make_late(monkeypatch)
    late = run_ranks(3, lambda c: all_reduced(c, codec, inputs[c.rank]))
    assert all(torch.equal(result, at_once[0]) for result in late)


@pytest.mark.slow
@pytest.mark.parametrize("codec", TWO_PASSES, ids=repr)
def test_halves(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = vectors(3)
    make_late(monkeypatch)

    def rank(communicator: Communicator) -> torch.Tensor:
        scatter = CompressedReduceScatter(codec, communicator, N, pieces=PIECES)
        gather = CompressedAllGather(codec, communicator, N, pieces=PIECES)
        for seed in (1, SEED):
            whole = gather(scatter(inputs[communicator.rank], seed=seed), seed=seed)
        return whole

    for result in run_ranks(3, rank):
        assert torch.equal(result, expected(codec, inputs))


def test_one_buffer_a_message_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests are for: they fail if a message is written while the one before it is under way."""

    def one_memory(self: phases.Slots, piece: int) -> torch.Tensor:
        size = self._sizes[piece]
        return self._memory[0][: self._rows * size].view(self._rows, size)

    inputs = vectors(2)
    make_late(monkeypatch)
    monkeypatch.setattr(phases.Slots, "__getitem__", one_memory)

    def rank(communicator: Communicator) -> torch.Tensor:
        all_reduce = all_reduce_for(TWO_PASSES[0], communicator, N, pieces=PIECES)
        x = inputs[communicator.rank].clone()
        all_reduce(x, seed=SEED)
        return x

    for result in run_ranks(2, rank):
        assert not torch.equal(result, expected(TWO_PASSES[0], inputs))


def test_over_sockets() -> None:
    inputs = vectors(3)

    def rank(local: Communicator) -> list[torch.Tensor]:
        communicator = StripedCommunicator(local, host="127.0.0.1")
        try:
            return [all_reduced(communicator, codec, inputs[local.rank]) for codec in TWO_PASSES + ONE_PASS]
        finally:
            communicator.close()

    for results in run_ranks(3, rank):
        for codec, result in zip(TWO_PASSES + ONE_PASS, results, strict=True):
            assert torch.equal(result, expected(codec, inputs))
