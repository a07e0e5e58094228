"""What a caller writes into parameters between a step and the next forward pass, after `wait()`, is trained on."""

from __future__ import annotations

import torch

from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import ALL, Case
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

every = grid(cover=1, case=ALL)


def stepped(case: Case, communicator: Communicator) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = Odd()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = case.make(module, optimizer, communicator)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(communicator.rank, step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@every
def test_writes_after_wait_stay(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        model, optimizer = stepped(case, communicator)
        model.wait()
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.fill_(0.125 * (1 + communicator.rank))
        loss = model(batch(communicator.rank, 2)).square().mean()
        assert all((parameter == 0.125 * (1 + communicator.rank)).all() for parameter in model.module.parameters())
        loss.backward()
        optimizer.step()
        model.close()

    run_ranks(3, rank)


@every
def test_writes_before_wait_change_no_message_on_its_way(case: Case) -> None:
    """What neighbours receive is what the step left, whenever their receivers look."""

    def rank(communicator: Communicator, writes: bool) -> torch.Tensor:
        model, _ = stepped(case, communicator)
        if writes and communicator.rank == 0:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.fill_(1e6)
        communicator.barrier().wait()
        model.wait()
        values = torch.cat([parameter.detach().reshape(-1) for parameter in model.module.parameters()])
        model.close()
        return values

    untouched, written = (run_ranks(3, rank, writes) for writes in (False, True))
    for peer in (1, 2):
        assert torch.equal(untouched[peer], written[peer])
