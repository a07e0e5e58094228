"""Copies of a wrapped module, by `copy` or pickle: plain modules that exchange nothing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, GradientAllReduce
from bagua_kernels.algorithms.algorithm import LocalCopy
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, gradients
from tests.algorithms.test_contract import ALGORITHMS
from tests.grids import grid, only


def pickled(model: object) -> object:
    return pickle.loads(pickle.dumps(model))


def saved(model: object) -> object:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_copy(copied: nn.Module, model: Algorithm) -> None:
    """The same state, in memory of its own, and backward passes that no other rank hears of."""
    assert type(copied) is LocalCopy
    assert type(copied.module) is type(model.module)
    assert list(copied.state_dict()) == list(model.state_dict())
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
        assert not ours._post_accumulate_grad_hooks
        assert not ours._backward_hooks
    copied(batch(0, 0)).square().mean().backward()
    with copied.no_sync(), copied.join():
        copied.weigh(2.0)


@grid(name=only(ALGORITHMS, *list(ALGORITHMS)[::3]), how=[copy.deepcopy, pickled, saved], cover=1)
def test_a_copy_exchanges_nothing(name: str, how) -> None:
    """In mid-training, while gradients exist, on one rank only; the original goes on."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        model = ALGORITHMS[name](Odd(), communicator=communicator, bucket_bytes=300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            if communicator.rank == 0:
                before = gradients(model)
                check_copy(how(model), model)
                check_copy(how({"model": model})["model"], model)
                assert all(a is None or torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
                inner = copy.deepcopy(model.module)
                assert not any(p._post_accumulate_grad_hooks for p in inner.parameters())
                inner(batch(0, 0)).sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_copy_after_steps_in_backward() -> None:
    """It has the parameters after the step."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        optimizer = optim.AdamW(module.parameters(), lr=0.01)
        model = ByteGrad(
            module,
            optimizer,
            communicator=communicator,
            apply_in_backward=True,
            bucket_bytes=300,
        )
        for step in range(3):
            model(batch(communicator.rank, step)).square().mean().backward()
            check_copy(copy.deepcopy(model), model)
            inner = copy.deepcopy(model.module)
            assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), model.parameters(), strict=True))
            optimizer.step()

    run_ranks(2, rank)


def test_running_means_of_parameters() -> None:
    """`AveragedModel` of a wrapper, in a training of two ranks: the means of what the ranks have in common."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = GradientAllReduce(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), communicator=communicator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        means = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        expected = [p.detach().clone() for p in model.parameters()]
        for step in range(4):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            means.update_parameters(model)
            now = [p.detach().clone() for p in model.parameters()]
            expected = now if step == 0 else [0.5 * (a + b) for a, b in zip(expected, now, strict=True)]
        for mean, wanted in zip(means.module.parameters(), expected, strict=True):
            assert torch.allclose(mean, wanted, atol=1e-6)
        means.eval()
        means(batch(0, 0))
        assert list(means.module.state_dict()) == list(model.state_dict())
        return {name: p.detach().clone() for name, p in means.named_parameters()}

    first, second = run_ranks(2, rank)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_copies_keep_what_belongs_to_the_module() -> None:
    """Its mode, hooks of forward passes, and, in a container, what other parts share with it."""

    class Trainer:
        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            self.model, self.optimizer = model, optimizer

    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Odd(), communicator=communicator)
        model.register_forward_hook(double)
        model.eval()
        copied = copy.deepcopy(Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        assert not copied.model.training
        assert torch.equal(copied.model(batch(0, 0)), model(batch(0, 0)))
        assert copied.optimizer.param_groups[0]["params"][0] is next(copied.model.parameters())
        again = copy.deepcopy(copied.model)
        assert type(again) is LocalCopy
        # A copy may be trained by ranks together, when its module is wrapped; the first one goes on by itself.
        other = ByteGrad(again.module, communicator=communicator)
        other(batch(communicator.rank, 0)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"leave out torch\.nn\.DataParallel"):
            model._replicate_for_data_parallel()

    run_ranks(2, rank)


def double(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return 2 * output
