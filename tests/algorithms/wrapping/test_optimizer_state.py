"""Groups of an optimizer stay the objects that they are while algorithms set its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import algorithms, optim
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, loss_of
from tests.grids import grid

Make = Callable[[nn.Module, torch.Tensor], torch.optim.Optimizer]


def _both(module: nn.Module, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> optim.ChainedOptimizer:
    first, *rest = module.parameters()
    return optim.ChainedOptimizer(make([first]), make(rest))


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda module, lr: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9),
    "adam": lambda module, lr: torch.optim.Adam(module.parameters(), lr=lr, betas=(0.5, 0.9)),
    "ours": lambda module, lr: optim.AdamW(module.parameters(), lr=lr),
    "chain": lambda module, lr: _both(module, lambda p: optim.SGD(p, lr=lr)),
    "chain of torch's": lambda module, lr: _both(module, lambda p: torch.optim.SGD(p, lr=lr)),
}


@grid(optimizer=OPTIMIZERS, name=["GradientAllReduce", "LocalSGD"], cover=1)
def test_wrapping_keeps_groups_and_tensors(optimizer: Make, name: str) -> None:
    """Ranks begin with rank 0's options; what was held before still decides about steps."""

    def rank(c: Communicator) -> float:
        module, lr = Odd(), torch.tensor(0.25 + c.rank)
        made = optimizer(module, lr)
        made.param_groups[0]["of_rank"] = c.rank
        if c.rank:
            made.param_groups[0]["only_here"] = True
        groups = list(made.param_groups)
        model = getattr(algorithms, name)(module, made, communicator=c)
        assert all(a is b for a, b in zip(groups, made.param_groups, strict=True))
        assert all(group["lr"] is lr for group in groups)
        assert float(lr) == 0.25
        assert (groups[0]["of_rank"], "only_here" in groups[0]) == (0, False)
        lr.fill_(0.0)
        for group in groups:
            group["weight_decay"] = 0.0
        before = [p.detach().clone() for p in module.parameters()]
        loss_of(model, c.rank, 0).backward()
        made.step()
        if isinstance(model, algorithms.LocalSGD):
            model.wait()
        moved = max(float((a - b).detach().abs().max()) for a, b in zip(before, module.parameters(), strict=True))
        model.close()
        return moved

    assert run_ranks(2, rank) == [0.0, 0.0]


def test_a_schedule_made_before_goes_on() -> None:
    def rank(c: Communicator) -> list[float]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        group, container = optimizer.param_groups[0], optimizer.param_groups
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        found = []
        with algorithms.GradientAllReduce(module, optimizer, communicator=c) as model:
            assert optimizer.param_groups is container
            for step in range(2):
                loss_of(model, c.rank, step).backward()
                optimizer.step()
                schedule.step()
                found.append(group["lr"])
        return found

    assert run_ranks(2, rank) == [[0.5, 0.25]] * 2


@pytest.mark.parametrize("what", ["join", "synchronize", "switch_to", "load"])
def test_later_changes_of_the_state_keep_groups(what: str) -> None:
    def rank(c: Communicator) -> tuple[float, float]:
        module, lr = Odd(), torch.tensor(0.125)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
        group = optimizer.param_groups[0]
        on_parameters: dict[str, Any] = {} if what == "join" else {"average_states": True}
        kind = algorithms.GradientAllReduce if what == "join" else algorithms.Decentralized
        model = kind(module, optimizer, communicator=c, **on_parameters)
        saved = model.algorithm_state_dict()
        if what == "join":
            with model.join(optimizer):
                for step in range(1 + c.rank):
                    loss_of(model, c.rank, step).backward()
                    optimizer.step()
        else:
            loss_of(model, c.rank, 0).backward()
            optimizer.step()
        if what == "synchronize":
            model.synchronize()
        elif what == "switch_to":
            model = model.switch_to(algorithms.LocalSGD, optimizer=optimizer)
        elif what == "load":
            model.load_algorithm_state_dict(saved)
        assert optimizer.param_groups[0] is group
        assert group["lr"] is lr
        model.close()
        return float(lr), float(sum(s["momentum_buffer"].sum() for s in optimizer.state.values() if s))

    first, second = run_ranks(2, rank)
    assert first[0] == second[0] == 0.125
    assert first[1] == second[1]
