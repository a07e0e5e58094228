"""Threads that exchange buckets: what they raise."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms.engine.communication_lane import CommunicationLane
from bagua_kernels.bucket import Bucket
from bagua_kernels.errors import RankLostError


class Losing:
    """Loses rank 2 in every exchange."""

    def exchange(self, bucket: Bucket, step: int) -> None:
        raise RankLostError("rank 2 was lost", [2])


def test_exchanges_after_a_failure_fail_alike() -> None:
    """The kind of the first error and its ranks stay, for whoever sees the second one decides by them."""
    losing = Losing()
    lane = CommunicationLane(losing.exchange, torch.device("cpu"), "test")
    bucket = Bucket([torch.zeros(3)], align=1)
    tasks = [lane.start(bucket, step) for step in range(3)]
    for task in tasks:
        assert task.done.wait(10)
        assert isinstance(task.error, RankLostError)
        assert task.error.ranks == (2,)
        assert "rank 2 was lost" in str(task.error)
    lane.close()
