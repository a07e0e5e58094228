"""The collectives as generators: the same bits as a call, whoever waits and in whatever turns."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import AllReduce, all_reduce_for
from bagua_kernels.comm.hierarchical import HierarchicalAllReduce
from bagua_kernels.compression import Cast, Codec, MinMaxUInt8, TernGrad, TopK
from bagua_kernels.errors import CommunicationError
from tests.comm.compressed.lazy import make_late
from tests.grids import grid
from tests.oracles.vectors import make

SEED, N, PIECES = 7, 5003, 3


def vectors(rank: int) -> list[torch.Tensor]:
    return [torch.from_numpy(make("gaussian", N, 1.0, 2 * rank + i)) for i in range(2)]


@grid(
    cover=1,
    plain_below={"compressed": 0, "plain": N + 1},
    codec=[MinMaxUInt8(64, True), TopK(0.1), Cast(), TernGrad(64, shared=True)],
)
def test_two_vectors_in_turns(codec: Codec, plain_below: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_late(monkeypatch)

    def made(communicator: Communicator) -> list[AllReduce]:
        options = {} if isinstance(codec, TernGrad) else {"worker_residual": True}
        return [
            all_reduce_for(codec, communicator, N, 2, pieces=PIECES, plain_below=plain_below, **options)
            for _ in range(2)
        ]

    def called(communicator: Communicator) -> list[torch.Tensor]:
        results = []
        for i, all_reduce in enumerate(made(communicator)):
            for step in range(2):
                x, exact = vectors(communicator.rank)[i], torch.tensor([1.0, communicator.rank])
                all_reduce(x, exact, seed=SEED + step + i)
                results += [x, exact]
        return results

    def driven(communicator: Communicator) -> list[torch.Tensor]:
        both = made(communicator)
        results: list[list[torch.Tensor]] = [[], []]
        for step in range(2):
            xs, exacts = vectors(communicator.rank), [torch.tensor([1.0, communicator.rank]) for _ in range(2)]
            under_way = [
                all_reduce.steps(x, exact, seed=SEED + step + i)
                for i, (all_reduce, x, exact) in enumerate(zip(both, xs, exacts, strict=True))
            ]
            for works in zip_longest(*under_way):
                assert torch.is_grad_enabled()
                for work in works:
                    work.wait()
            for i in range(2):
                results[i] += [xs[i], exacts[i]]
        return results[0] + results[1]

    for expected, got in zip(run_ranks(2, called), run_ranks(2, driven), strict=True):
        assert len(expected) == len(got)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_gradients_are_not_recorded() -> None:
    def rank(communicator: Communicator) -> None:
        x = torch.nn.Parameter(vectors(communicator.rank)[0])
        for work in all_reduce_for(MinMaxUInt8(64), communicator, N).steps(x):
            work.wait()
        assert x.grad_fn is None

    run_ranks(2, rank)


@pytest.mark.parametrize("codec", [None, MinMaxUInt8(64)], ids=repr)
def test_hierarchical(codec: Codec | None) -> None:
    def rank(communicator: Communicator) -> None:
        nodes = [[0, 1], [2]]
        with HierarchicalAllReduce(communicator, N, torch.float32, nodes=nodes, codec=codec, pieces=PIECES) as reduce:
            called, driven = vectors(communicator.rank)[0], vectors(communicator.rank)[0]
            reduce(called, seed=SEED)
            for work in reduce.steps(driven, seed=SEED):
                work.wait()
            assert torch.equal(called, driven)

    run_ranks(3, rank)


def test_hierarchical_that_is_left_is_aborted() -> None:
    def rank(communicator: Communicator) -> None:
        reduce = HierarchicalAllReduce(communicator, N, torch.float32, nodes=[[0], [1]])
        steps = reduce.steps(vectors(communicator.rank)[0])
        next(steps)
        steps.close()
        with pytest.raises(CommunicationError):
            reduce(vectors(communicator.rank)[0])

    run_ranks(2, rank)
