"""What all doors share, without any of their libraries."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm, names
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.integrations.guest import Guest
from bagua_kernels.optim import ChainedOptimizer
from tests.doors.jobs import Net

WRAPPED = [name for name in names() if not issubclass(Algorithm.named(name)[0], MomentumAllReduce)]


@pytest.mark.filterwarnings("ignore")
def test_every_algorithm_can_be_used_with_the_scaler_of_a_library() -> None:
    """Those without an option `scaler`, such as `diloco`, count the steps that were taken, and are not given it."""
    for name in WRAPPED:
        net = Net()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if name == "mu_loco":
            matrices = [p for p in net.parameters() if p.dim() == 2]
            others = [p for p in net.parameters() if p.dim() != 2]
            optimizer = ChainedOptimizer(torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        guest = Guest(name)
        model = guest.wrap(net, [optimizer], torch.device("cpu"), scaler)
        scaler.scale(model(torch.ones(2, 12)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        guest.close()
        assert not comm.is_initialized(), name
