"""Algorithms on parameters leave each parameter a storage of its own: for what writes, copies or shares storages."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Choco,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    StochasticGradientPush,
)
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.own_storage import with_own_storage
from tests.algorithms.ranks import batch
from tests.grids import grid

KINDS = [Decentralized, DiLoCo, Choco, StochasticGradientPush, AsyncModelAverage]


class Mixed(nn.Module):
    """Parameters of several dtypes and layouts, an odd number of elements each, one without any."""

    def __init__(self, double: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 7, generator=generator))
        self.columns = nn.Parameter(torch.randn(7, 3, generator=generator).t())
        self.bfloat = nn.Parameter(torch.randn(3, generator=generator).bfloat16())
        self.float16 = nn.Parameter(torch.randn(5, generator=generator).half())
        self.float64 = nn.Parameter(torch.randn(3, generator=generator).double() if double else torch.ones(3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ (self.weight + self.columns).t() * self.scalar + self.bfloat.float() + self.float64.float()
        return y + self.float16.float().sum() + self.nothing.sum()


def made(kind: Any, communicator: Communicator) -> tuple[Any, Mixed, torch.optim.Optimizer]:
    module = Mixed(double=kind is not Choco)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return kind(module, optimizer, communicator=communicator), module, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def check_alone(module: nn.Module) -> None:
    parameters = list(module.parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    assert len({p.untyped_storage().data_ptr() for p in parameters if p.numel()}) == len(parameters) - 1
    one = io.BytesIO()
    torch.save(parameters[3].detach(), one)
    alone = io.BytesIO()
    torch.save(parameters[3].detach().clone(), alone)
    assert len(one.getvalue()) == len(alone.getvalue())


@grid(kind=KINDS, cover=1)
def test_storages_are_alone_in_training_and_afterwards(kind: Any) -> None:
    """Strides stay; afterwards the memory is PyTorch's own, which may be resized."""

    def rank(communicator: Communicator) -> None:
        model, module, optimizer = made(kind, communicator)
        strides = [p.stride() for p in module.parameters()]
        train(model, optimizer, communicator.rank, range(3))
        check_alone(module)
        model.synchronize()
        check_alone(module)
        before = [p.detach().clone() for p in module.parameters()]
        model.close()
        check_alone(module)
        assert all(p.untyped_storage().resizable() for p in module.parameters() if p.numel())
        assert all(map(torch.equal, before, module.parameters()))
        assert [p.stride() for p in module.parameters()] == strides
        model.unflatten()

    run_ranks(2, rank)


@grid(kind=KINDS, cover=1)
def test_unflatten_changes_no_bit_of_training(kind: Any) -> None:
    """At any point, also while what is saved still exists; and calls that read buckets see what was written since."""

    def rank(communicator: Communicator, unflattens: bool) -> Any:
        model, module, optimizer = made(kind, communicator)
        states = []
        for step in range(6):
            if unflattens:
                model.unflatten()
                check_alone(module)
                assert all(p.untyped_storage().resizable() for p in module.parameters() if p.numel())
                states.append(module.state_dict())
            train(model, optimizer, communicator.rank, range(step, step + 1))
            if kind is AsyncModelAverage:
                model.synchronize()
        model.wait()
        if unflattens:
            model.unflatten()
        with torch.no_grad():
            module.weight.add_(communicator.rank)
        own = module.weight.detach().clone()
        with model.averaged():
            means = [p.detach().clone() for p in module.parameters()]
        assert torch.equal(own, module.weight)
        distance = model.consensus()
        model.synchronize()
        return distance, means, [p.detach().clone() for p in module.parameters()]

    for (one, *lists), (other, *others) in zip(run_ranks(2, rank, False), run_ranks(2, rank, True), strict=True):
        assert one == other
        for ours, theirs in zip(lists, others, strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", [GradientAllReduce, ByteGrad, Decentralized])
@pytest.mark.parametrize("size", [1, 2])
def test_unflatten_is_harmless_everywhere(kind: Any, size: int) -> None:
    """Gradient algorithms and one rank alone leave parameters where they are."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 3)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = kind(module, optimizer, communicator=communicator)
        before = module.weight.detach()
        model.unflatten()
        if size == 1 or kind is not Decentralized:
            assert module.weight.is_set_to(before)
        model.close()
        model.unflatten()

    run_ranks(size, rank)


def test_after_a_switch_to_gradients_parameters_have_their_own_memory() -> None:
    """The buckets of the first algorithm are free."""

    def rank(communicator: Communicator) -> None:
        model, module, optimizer = made(Decentralized, communicator)
        train(model, optimizer, communicator.rank, range(2))
        other = model.switch_to(GradientAllReduce, optimizer=optimizer)
        assert all(p.untyped_storage().resizable() for p in module.parameters() if p.numel())
        train(other, optimizer, communicator.rank, range(2))
        last = other.switch_to(DiLoCo, optimizer=optimizer)
        check_alone(module)
        train(last, optimizer, communicator.rank, range(2))
        last.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_the_module_are_apart(how: Any) -> None:
    """They have the values of then, in memory of their own, and no more of it than they need."""

    def rank(communicator: Communicator) -> None:
        model, module, optimizer = made(Decentralized, communicator)
        copied = how(module)
        before = [p.detach().clone() for p in copied.parameters()]
        train(model, optimizer, communicator.rank, range(2))
        check_alone(copied)
        assert all(map(torch.equal, copied.parameters(), before))
        assert not torch.equal(copied.weight, module.weight)

    run_ranks(2, rank)


def test_memory_that_is_shared_with_other_processes_is_not_trained() -> None:
    """Training goes on in this process's memory, with a warning, as if the module had not been sent."""

    def rank(communicator: Communicator, shares: bool) -> Any:
        model, module, optimizer = made(Decentralized, communicator)
        train(model, optimizer, communicator.rank, range(2))
        if shares:
            module.share_memory()
            assert module.weight.is_shared()
        train(model, optimizer, communicator.rank, range(2, 4))
        model.synchronize()
        assert not module.weight.is_shared()
        return [p.detach().clone() for p in module.parameters()]

    # Ranks are threads, which share what is recorded.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shared = run_ranks(2, rank, True)
    assert any("shared memory" in str(each.message) for each in told)
    for ours, theirs in zip(run_ranks(2, rank, False), shared, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_compiled_module_trains_alike() -> None:
    """Compilers look at storages and their beginnings."""

    def rank(communicator: Communicator, compiles: bool) -> Any:
        model, module, optimizer = made(Decentralized, communicator)
        if compiles:
            module.compile(backend="aot_eager")
        train(model, optimizer, communicator.rank, range(3))
        model.synchronize()
        return [p.detach().clone() for p in module.parameters()]

    for ours, theirs in zip(run_ranks(2, rank, False), run_ranks(2, rank, True), strict=True):
        assert all(map(torch.allclose, ours, theirs))


@grid(
    cover=1,
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    layout=[((2, 3), (3, 1)), ((2, 3), (1, 2)), ((1, 6), (77, 1)), ((6,), (1,)), ((), ()), ((0, 3), (3, 1))],
    default=["cpu", "meta"],
)
def test_a_view_with_a_storage_of_its_own(dtype: torch.dtype, layout: Any, default: str) -> None:
    """It is the same memory, whatever device is the default, and stays when the whole is forgotten."""
    shape, strides = layout
    whole = torch.arange(11, dtype=torch.float32).to(dtype)
    view = whole.as_strided(shape, strides, 3)
    with torch.device(default):
        alone = with_own_storage(view)
    assert (alone.shape, alone.stride(), alone.dtype, alone.device) == (shape, strides, dtype, view.device)
    assert alone.data_ptr() == view.data_ptr()
    assert alone.untyped_storage().nbytes() == view.nbytes
    whole.mul_(2)
    expected = view.clone()
    del whole, view
    assert torch.equal(alone, expected)
