"""Samples of an epoch whose ranks become fewer: each is drawn once, but for those of the lost rank's last step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.data.balanced_batches import LoadBalancingDistributedBatchSampler
from bagua_kernels.algorithms.data.balanced_sampler import LoadBalancingDistributedSampler
from bagua_kernels.comm import Communicator, Membership, run_ranks
from tests.algorithms.test_healing import Net
from tests.grids import grid

SAMPLES, RANKS = 48, 3


def trains(communicator: Communicator, spec: str, ends: dict[int, int], batches: bool) -> dict[str, Any]:
    members = Membership(communicator)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = from_spec(spec, net, optimizer, communicator=members.communicator, on_failure="heal")
    costs = [1.0 + index % 5 for index in range(SAMPLES)]
    samples: Any = LoadBalancingDistributedSampler(range(SAMPLES), costs, num_replicas=RANKS, rank=communicator.rank)
    sampler = LoadBalancingDistributedBatchSampler(samples, max_cost=8.0) if batches else samples
    sampler.follow(algorithm)
    used: list[list[int]] = [[], []]
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for item in sampler:
            if ends.get(communicator.rank) == step:
                return {"lost": item if batches else [item], "used": used}
            x = torch.randn(4, 12)
            optimizer.zero_grad()
            F.cross_entropy(algorithm(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            used[epoch] += item if batches else [item]
            step += 1
    algorithm.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return {"lost": [], "used": used, "replicas": sampler.num_replicas}


@grid(spec=["bytegrad", "decentralized"], batches=[False, True], ends=[{1: 4}, {0: 0, 2: 7}, {2: 9}])
def test_each_sample_is_drawn_once(spec: str, batches: bool, ends: dict[int, int]) -> None:
    found = run_ranks(RANKS, trains, spec, ends, batches, timeout=5.0)
    assert {each["replicas"] for each in found if "replicas" in each} == {RANKS - len(ends)}
    for epoch in range(2):
        drawn = Counter(sample for each in found for sample in each["used"][epoch])
        missing = set(range(SAMPLES)) - set(drawn)
        if spec == "bytegrad":
            assert missing <= {sample for each in found for sample in each["lost"]}
        # Of gossip some ranks may be a step ahead when they learn of the loss.
        assert len(missing) <= 6 * len(ends)
        # The last samples come again, where the number of ranks does not divide theirs.
        assert sum(count - 1 for count in drawn.values()) < 2 * RANKS
