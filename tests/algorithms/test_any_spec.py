"""A loop that takes any spec: what every algorithm has, what it counts, and whose parameters a state has."""

from __future__ import annotations

import json
import warnings
from typing import get_args, get_overloads, get_type_hints

import pytest
import torch
from torch import nn

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, from_spec, names, specs
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts
from tests.grids import grid


def make(spec: str, communicator: Communicator) -> tuple[nn.Module, torch.optim.Optimizer, Algorithm]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net, optimizer, from_spec(spec, net, optimizer, communicator=communicator)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, model: Algorithm) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


@grid(spec=[name for name in names() if name not in ("mu_loco", "qadam", "onebit_adam")], ranks=[1, 2], cover=1)
def test_every_algorithm_has_what_a_loop_calls(spec: str, ranks: int) -> None:
    def rank(communicator: Communicator) -> None:
        net, optimizer, model = make(spec, communicator)
        assert isinstance(model.optimizer, torch.optim.Optimizer)
        taken = optimizer if isinstance(model, ModelAlgorithm) else model.optimizer
        for _ in range(3):
            step(net, taken, model)
        model.wait()
        with model.averaged():
            inside = [p.detach().clone() for p in net.parameters()]
        assert model.consensus() >= 0
        model.synchronize()
        for one, other in zip(inside, net.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach())
        found = model.stats().as_dict()
        assert found["steps"] == 3
        assert json.loads(json.dumps(found)).keys() == found.keys()
        model.close()

    run_ranks(ranks, rank)


def test_one_rank_counts_passes_that_would_be_exchanged() -> None:
    def rank(communicator: Communicator) -> None:
        net, optimizer, model = make("bytegrad", communicator)
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        assert model.stats().steps == 0
        step(net, optimizer, model)
        assert model.stats().steps == 1
        model.close()
        net(torch.ones(2, 3)).sum().backward()
        assert model.stats().steps == 1
        del model
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())

    run_ranks(1, rank)


def test_a_state_in_mid_round_is_said_to_be_this_ranks_own_once() -> None:
    def rank(communicator: Communicator) -> list[str]:
        net, optimizer, model = make("local_sgd:interval=2", communicator)
        found: list[str] = []

        def state() -> bool:
            # Each rank is a thread, and filters of warnings are the process's.
            before = len(found)
            local = model.local  # type: ignore[union-attr]
            local._warned_of_own = False
            if local.own and parts.loop(model).leaves_own():
                found.append("own")
            return len(found) > before

        assert not state()
        step(net, optimizer, model)
        assert state()
        with model.averaged():
            assert not state()
        step(net, optimizer, model)
        model.wait()
        assert not state()
        step(net, optimizer, model)
        model.synchronize()
        assert not state()
        step(net, optimizer, model)
        if communicator.rank == 0:
            model.__dict__["_warned_of_own"] = False
            with pytest.warns(RuntimeWarning, match="rank 0's own parameters.*synchronize") as caught:
                [each.state_dict() for each in (model.module, model)]
            assert len([each for each in caught if "own parameters" in str(each.message)]) == 1
        communicator.barrier().wait()
        model.synchronize()
        model.close()
        return found

    run_ranks(2, rank)


def test_type_checkers_know_the_class_of_each_name() -> None:
    found = {}
    for each in get_overloads(specs.from_spec):
        hints = get_type_hints(each, vars(specs) | vars(algorithms))
        for name in get_args(hints["spec"]):
            found[name] = hints["return"]
    assert found == {name: Algorithm.registered[name] for name in names()}
