"""A constructor that fails half-way raises its own error, whatever is missing then."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import algorithms
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.asynchronous import averages
from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.errors import RankLostError


@pytest.mark.parametrize("kind", [algorithms.AsyncModelAverage, algorithms.AsyncDecentralized, algorithms.Wagma])
@pytest.mark.parametrize("part", ["PublishedModel", "Courier"])
def test_the_error_of_an_opening_is_not_masked(
    kind: type[Algorithm], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By attributes that the constructor had not set yet."""

    def fails(*_: object) -> None:
        raise RankLostError("it cannot be opened", [1])

    monkeypatch.setattr(averages, part, fails)

    def rank(c: LocalCommunicator) -> None:
        net = torch.nn.Linear(4, 4)
        with pytest.raises(RankLostError, match="it cannot be opened"):
            kind(net, torch.optim.SGD(net.parameters(), lr=0.1), communicator=c)

    run_ranks(2, rank)
