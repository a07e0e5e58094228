"""The attribute of `DistributedDataParallel`, and the method of FSDP2, by which loops accumulate gradients without `no_sync`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from bagua_kernels import algorithms, optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, GradientAllReduce
from bagua_kernels.comm import Communicator, LocalCommunicator, run_ranks
from tests.algorithms.ranks import Odd, loss_of
from tests.grids import grid

Switch = Callable[[Algorithm, bool], AbstractContextManager[None]]


def attribute(model: Algorithm, last: bool) -> AbstractContextManager[None]:
    model.require_backward_grad_sync = last
    return contextlib.nullcontext()


def method(model: Algorithm, last: bool) -> AbstractContextManager[None]:
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def block(model: Algorithm, last: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if last else model.no_sync()


def trained(c: Communicator, name: str, in_backward: bool, switch: Switch) -> tuple[list[torch.Tensor], int, int]:
    """Parameters after three steps of three micro-batches, the exchanges and the bytes sent."""
    module = Odd()
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    options = {"apply_in_backward": True} if in_backward else {}
    model = getattr(algorithms, name)(module, optimizer, communicator=c, **options)
    for step in range(3):
        for micro in range(3):
            with switch(model, micro == 2):
                loss_of(model, c.rank, 3 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = model.stats()
    model.close()
    return [p.detach().clone() for p in module.parameters()], stats.steps, stats.bytes_sent


@grid(name=["GradientAllReduce", "ByteGrad", "TopK", "PowerSGD"], in_backward=[False, True], switch=[attribute, method])
def test_micro_batches_are_exchanged_as_with_no_sync(name: str, in_backward: bool, switch: Switch) -> None:
    expected = run_ranks(2, trained, name, in_backward, block)
    got = run_ranks(2, trained, name, in_backward, switch)
    for (values, steps, sent), (wanted, wanted_steps, wanted_sent) in zip(got, expected, strict=True):
        assert all(map(torch.equal, values, wanted))
        assert (steps, sent) == (wanted_steps, wanted_sent)
        assert steps == 3


@pytest.mark.parametrize("name", ["LocalSGD", "Decentralized", "AsyncModelAverage"])
def test_algorithms_on_parameters_take_their_steps(name: str) -> None:
    """Their backward passes send nothing, and each step of the optimizer counts, as within `no_sync`."""

    def rank(c: Communicator) -> int:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with getattr(algorithms, name)(module, optimizer, communicator=c) as model:
            model.require_backward_grad_sync = False
            model.set_requires_gradient_sync(False)
            assert not model.require_backward_grad_sync
            for step in range(3):
                loss_of(model, c.rank, step).backward()
                optimizer.step()
            return model.stats().steps

    assert run_ranks(2, rank) == [3, 3]


def test_blocks_restore_what_was_set() -> None:
    def rank(c: Communicator) -> None:
        with ByteGrad(Odd(), communicator=c) as model:
            assert model.require_backward_grad_sync
            with model.no_sync():
                assert not model.require_backward_grad_sync
            assert model.require_backward_grad_sync
            model.require_backward_grad_sync = False
            with model.no_sync():
                model.require_backward_grad_sync = True
            assert not model.require_backward_grad_sync
            loss_of(model, c.rank, 0).backward()
            assert model.stats().steps == 0

    run_ranks(2, rank)


def test_one_rank_and_copies_have_it() -> None:
    model = GradientAllReduce(Odd(), communicator=LocalCommunicator.alone())
    model.require_backward_grad_sync = False
    assert not model.require_backward_grad_sync
    copied = copy.deepcopy(model)
    copied.set_requires_gradient_sync(False)
    assert not copied.require_backward_grad_sync
    with pytest.raises(ValueError, match="recurse"):
        model.set_requires_gradient_sync(True, recurse=False)
