"""A `with` block around a loop that calls the bare model: what it does inside, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import DiLoCo, LocalSGD, OuterNesterov
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.common import Case, cases
from tests.algorithms.ranks import batch, fill
from tests.grids import grid

STEPS = 8


def net() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Sequential(nn.Tanh(), nn.Linear(11, 3)))
    fill(module)
    return module


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """The loop of somebody who knows nothing of other ranks."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def hooks(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All hooks of a module, of the modules and parameters in it, and of an optimizer."""
    found = {}
    for name, each in (*module.named_modules(), *module.named_parameters(), ("optimizer", optimizer)):
        # Of parameters, such attributes of tensors as `_backward_hooks`.
        keys = {key for kind in type(each).__mro__ for key in vars(kind)} | set(getattr(each, "__dict__", {}))
        for key in sorted(key for key in keys if key.endswith("_hooks")):
            value = getattr(each, key)
            if value and not callable(value):
                found[f"{name} {key}"] = list(value.values())
    return found


@grid(case=cases("local_sgd", "streaming", "sparse_loco, delayed"), kind=[torch.optim.AdamW, optim.AdamW], cover=1)
def test_a_block_does_what_a_wrapper_does(case: Case, kind: Any) -> None:
    """The loop calls `net`, the evaluation in the middle too; parameters and buffers have the same bits."""

    def rank(communicator: Communicator, bare: bool) -> list[torch.Tensor]:
        module = net()
        optimizer = kind(module.parameters(), lr=0.02)
        with case.make(module, optimizer, communicator) as model:
            train(module if bare else model, optimizer, communicator.rank, range(STEPS // 2))
            model.eval()
            with torch.no_grad():
                (module if bare else model)(batch(communicator.rank, 99))
            model.train()
            train(module if bare else model, optimizer, communicator.rank, range(STEPS // 2, STEPS))
        return [flat(module), *(buffer.clone() for buffer in module.buffers())]

    for bare, wrapped in zip(*(run_ranks(2, rank, bare) for bare in (True, False)), strict=True):
        assert all(map(torch.equal, bare, wrapped))


@grid(case=cases("diloco", "delayed", "sparse_loco"), kind=[torch.optim.SGD, torch.optim.AdamW, optim.AdamW], cover=1)
def test_a_block_removes_every_hook(case: Case, kind: Any) -> None:
    """Afterwards the same objects train on as if nobody had ever met: bit for bit, by the states that they have."""

    def rank(communicator: Communicator) -> None:
        module = net()
        optimizer = kind(module.parameters(), lr=0.02)
        parameters = list(module.parameters())
        before = hooks(module, optimizer)
        with case.make(module, optimizer, communicator) as model:
            assert hooks(module, optimizer) != before
            train(module, optimizer, communicator.rank, range(STEPS))
            model.synchronize()
        assert hooks(module, optimizer) == before
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
        plain = net()
        plain.load_state_dict(copy.deepcopy(module.state_dict()))
        other = kind(plain.parameters(), lr=0.02)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(module, optimizer, communicator.rank, range(STEPS, STEPS + 5))
        train(plain, other, communicator.rank, range(STEPS, STEPS + 5))
        assert torch.equal(flat(module), flat(plain))
        assert all(map(torch.equal, module.buffers(), plain.buffers()))

    before = set(threading.enumerate())
    run_ranks(2, rank)
    assert set(threading.enumerate()) <= before


def test_a_block_that_ends_in_an_exception_removes_every_hook() -> None:
    def rank(communicator: Communicator) -> None:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        before = hooks(module, optimizer)

        def block() -> None:
            with DiLoCo(module, optimizer, communicator=communicator, interval=3, delay=2):
                train(module, optimizer, communicator.rank, range(4))  # in the middle of an exchange
                raise KeyError("a bad file")

        with pytest.raises(KeyError):
            block()
        assert hooks(module, optimizer) == before
        x = flat(module)
        train(module, optimizer, communicator.rank, range(2))
        assert not torch.equal(flat(module), x)

    run_ranks(2, rank)


def test_blocks_come_one_after_another() -> None:
    """Each begins with what ranks have then; the loop between them is each rank's own."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        seen = []
        for kind in (LocalSGD, DiLoCo, LocalSGD):
            with kind(module, optimizer, communicator=communicator, interval=2):
                seen.append(flat(module))
                train(module, optimizer, communicator.rank, range(4))
            seen.append(flat(module))
            train(module, optimizer, communicator.rank, range(3))
            seen.append(flat(module))
        return seen

    first, second = run_ranks(2, rank)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True, True, False] * 3


def test_a_forgotten_wrapper_leaves_no_hook_that_acts() -> None:
    """Hooks hold it weakly: when the last reference has gone, the optimizer goes on by itself."""

    def rank(communicator: Communicator) -> bool:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        model = LocalSGD(module, optimizer, communicator=communicator, interval=2)
        train(module, optimizer, communicator.rank, range(2))
        model.wait()
        communicator.barrier().wait()
        del model
        gc.collect()
        train(module, optimizer, communicator.rank, range(2, 6))
        communicator.barrier().wait()
        return bool(flat(module).isfinite().all())

    assert run_ranks(2, rank) == [True, True]


def test_outer_nesterov_is_left_without_a_hook() -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    before = hooks(module, optimizer)
    with OuterNesterov(optimizer, interval=3):
        assert hooks(module, optimizer) != before
        train(module, optimizer, 0, range(7))
    assert hooks(module, optimizer) == before
    plain = net()
    plain.load_state_dict(copy.deepcopy(module.state_dict()))
    other = torch.optim.AdamW(plain.parameters(), lr=0.02)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(module, optimizer, 0, range(7, 12))
    train(plain, other, 0, range(7, 12))
    assert torch.equal(flat(module), flat(plain))
