"""A round beside training ends where all ranks are about to take the mean of their models anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import AsyncModelAverage
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.mailbox.triggered import TriggeredAverage
from tests import limits
from tests.algorithms import parts
from tests.algorithms.asynchronous.common import made, train, trained

BLOCKED = 2  # the bucket at which couriers wait until all ranks rest


@pytest.mark.parametrize(
    ("make", "call", "exchanged"),
    [
        (partial(AsyncModelAverage, interval=1), "synchronize", BLOCKED + 2),
        (partial(AsyncModelAverage, interval=1, codec="minmax_uint8:block=64"), "synchronize", BLOCKED + 2),
        (partial(AsyncModelAverage, interval=1), "averaged", BLOCKED + 2),
        (partial(AsyncModelAverage, interval=1), "algorithm_state_dict", None),
    ],
)
def test_the_rest_of_a_round_is_left_out(
    monkeypatch: pytest.MonkeyPatch, make: Any, call: str, exchanged: int | None
) -> None:
    """At the same bucket on all ranks; the mean stays what it was, and other calls get whole rounds."""
    counts: Counter[int] = Counter()
    averages: list[TriggeredAverage] = []
    contribute = TriggeredAverage._contribute

    def counted(self: TriggeredAverage, version: int, members: Sequence[int]) -> Any:
        plain = self._group_mean

        def mean(members: Sequence[int], index: int, vector: torch.Tensor, number: int) -> None:
            counts[self._mailbox.rank] += 1
            if index == BLOCKED:
                limits.until(lambda: len(averages) == 2 and all(each.rests for each in averages), "all ranks rest")
            plain(members, index, vector, number)

        monkeypatch.setattr(self, "_group_mean", mean)
        return contribute(self, version, tuple(members))

    monkeypatch.setattr(TriggeredAverage, "_contribute", counted)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*[torch.nn.Linear(7, 7) for _ in range(4)])
        module, optimizer, model = made(partial(make, bucket_bytes=1), communicator, layers)
        average = parts.averages(model).average
        assert isinstance(average, TriggeredAverage)
        averages.append(average)
        train(model, optimizer, communicator.rank, range(1))
        limits.until(lambda: counts[communicator.rank] > BLOCKED, "the round has come to the bucket")
        before = trained(module)
        if call == "averaged":
            with model.averaged():
                after = trained(module)
        else:
            getattr(model, call)()
            after = trained(module)
        found = counts[communicator.rank], len(model.local.flat.buckets)
        model.pause()
        model.close()
        return before, after, found[0] if found[0] < found[1] else -1

    results = run_ranks(2, rank)
    assert [count for _, _, count in results] == [exchanged or -1] * 2
    if exchanged is not None:
        mean = (results[0][0] + results[1][0]) / 2
        assert all(
            torch.allclose(after, mean, atol=0.01 if "codec" in make.keywords else 1e-6) for _, after, _ in results
        )
        assert torch.equal(results[0][1], results[1][1])
