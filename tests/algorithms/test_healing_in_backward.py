"""Passes that update parameters while backward goes on, and lose a rank between two buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.comm import Communicator, Membership, run_ranks
from bagua_kernels.errors import RankLostError
from bagua_kernels.optim import SGD
from tests.algorithms.test_healing import Net, batch, step_of, vector

RANKS, STEPS, AT, TIMEOUT = 4, 6, 3, 5.0
RATE, MOMENTUM = 0.05, 0.9
Commit = Callable[[Exchange], None]


class EndedError(Exception):
    """The end of a rank, on its communication thread."""


def trains(communicator: Communicator, commit_of: Callable[[int, Commit], Commit]) -> dict[str, Any] | None:
    """Trains with a step for each bucket; `commit_of` replaces what follows a bucket's exchange in one pass."""
    members = Membership(communicator)
    net = Net()
    optimizer = SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    options: dict[str, Any] = {"apply_in_backward": True, "bucket_bytes": 1, "on_failure": "heal"}
    algorithm = GradientAllReduce(net, optimizer, communicator=members.communicator, **options)
    assert algorithm._engine is not None
    healing = algorithm._engine._healing
    assert healing is not None
    groups = [list(each.names) for each in algorithm._engine.buckets.all]
    assert len(groups) > 2
    plain = healing.commit
    for step in range(STEPS):
        healing.commit = commit_of(communicator.rank, plain) if step == AT else plain  # type: ignore[method-assign]
        try:
            step_of(algorithm, optimizer, communicator.rank, step)
        except EndedError:
            return None
    found = {"own": vector(net), "ranks": members.ranks, "groups": groups}
    found["momentum"] = torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in net.parameters()])
    algorithm.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def expected(
    groups: Sequence[Sequence[str]], ranks_of: Callable[[int], Sequence[int]], left: Sequence[int]
) -> torch.Tensor:
    """What plain PyTorch comes to in float64, if the means of one step are over other ranks for each bucket.

    Args:
        groups: names of the parameters of each bucket.
        ranks_of: the ranks whose gradients a bucket's mean has in step `AT`.
        left: the ranks that take the steps behind it.
    """
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    named = dict(net.named_parameters())
    for step in range(STEPS):
        gradients = []
        for rank in range(RANKS):
            x, y = batch(rank, step)
            found = torch.autograd.grad(F.cross_entropy(net(x.double()), y), list(named.values()))
            gradients.append(dict(zip(named, found, strict=True)))
        for index, names in enumerate(groups):
            ranks = range(RANKS) if step < AT else ranks_of(index) if step == AT else left
            for name in names:
                named[name].grad = sum(gradients[rank][name] for rank in ranks) / len(ranks)  # type: ignore[assignment]
        optimizer.step()
    return vector(net)


@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_ends_between_two_buckets(last: int) -> None:
    """Means that all have are used as they are; those of later buckets are made again, over the ranks that are left."""

    def commit_of(rank: int, plain: Commit) -> Commit:
        def commit(exchange: Exchange) -> None:
            if exchange.bucket.index > last:
                raise EndedError
            plain(exchange)

        return commit if rank == 0 else plain

    found = [each for each in run_ranks(RANKS, trains, commit_of, timeout=TIMEOUT) if each is not None]
    left = [1, 2, 3]
    assert [each["ranks"] for each in found] == [tuple(left)] * len(left)
    for each in found:
        assert torch.equal(each["own"], found[0]["own"])
        assert torch.equal(each["momentum"], found[0]["momentum"])
    oracle = expected(found[0]["groups"], lambda index: range(RANKS) if index <= last else left, left)
    torch.testing.assert_close(found[0]["own"].double(), oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_one_rank_does_not_learn_that_all_have_a_mean(index: int) -> None:
    """It uses the mean that it has, once the others report that they may have used theirs. Nothing is counted twice."""

    def commit_of(rank: int, plain: Commit) -> Commit:
        def commit(exchange: Exchange) -> None:
            if exchange.bucket.index != index:
                plain(exchange)
                return
            exchange.communicator.barrier_on_host()
            raise RankLostError("its connection broke", [2])

        return commit if rank == 1 else plain

    found = [each for each in run_ranks(RANKS, trains, commit_of, timeout=TIMEOUT) if each is not None]
    assert [each["ranks"] for each in found] == [tuple(range(RANKS))] * RANKS
    for each in found:
        assert torch.equal(each["own"], found[0]["own"])
        assert torch.equal(each["momentum"], found[0]["momentum"])
    oracle = expected(found[0]["groups"], lambda index: range(RANKS), range(RANKS))
    torch.testing.assert_close(found[0]["own"].double(), oracle, rtol=1e-4, atol=1e-5)
