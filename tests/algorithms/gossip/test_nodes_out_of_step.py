"""Ranks of one node whose training threads are apart while exchanges of earlier buckets are under way."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.gossip.node_exchange import NodeMembers
from bagua_kernels.comm import Communicator, run_ranks
from tests import limits

SIZE, WIDTH, LAYERS, STEPS = 4, 16, 3, 3


@pytest.mark.parametrize("spec", ["lowprec", "choco:eta=0.5"])
def test_a_slow_training_thread(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank comes late to each mean of its node, when it has the payloads of the bucket before: results stay the same."""
    average = NodeMembers.average

    def trained(communicator: Communicator) -> torch.Tensor:
        generator = torch.Generator().manual_seed(communicator.rank)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with from_spec(
            spec, net, optimizer, communicator=communicator, nodes=[[0, 1], [2, 3]], bucket_bytes=WIDTH * WIDTH * 4
        ) as model:
            for _ in range(STEPS):
                model(torch.randn(2, WIDTH, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.wait()
            return torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])

    expected = run_ranks(SIZE, trained)

    def late(self: NodeMembers, vector: torch.Tensor) -> None:
        if self._mailbox.rank == SIZE - 1:
            time.sleep(limits.seconds(0.02))
        average(self, vector)

    monkeypatch.setattr(NodeMembers, "average", late)
    for found, wanted in zip(run_ranks(SIZE, trained), expected, strict=True):
        assert torch.equal(found, wanted)
