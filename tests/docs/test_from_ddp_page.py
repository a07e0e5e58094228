"""What docs/from-ddp.md says about held gradients, `no_sync` and loops that call parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, GradientAllReduce, ModelAlgorithm, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, fill, loss_of


@pytest.mark.parametrize(("around", "exchanges"), [("both", 0), ("backward", 0), ("forward", 1)])
def test_no_sync_counts_where_backward_begins(around: str, exchanges: int) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        model = GradientAllReduce(module, communicator=communicator)
        if around == "both":
            with model.no_sync():
                loss_of(model, communicator.rank, 0).backward()
        elif around == "backward":
            loss = loss_of(model, communicator.rank, 0)
            with model.no_sync():
                loss.backward()
        else:
            with model.no_sync():
                loss = loss_of(model, communicator.rank, 0)
            loss.backward()
        assert model.stats().steps == exchanges
        model.close()

    run_ranks(2, rank)


def test_held_gradients() -> None:
    """What was held over a step stays; what was held since a pass without exchange has this rank's sum."""

    def rank(communicator: Communicator) -> None:
        module, alone = Odd(), Odd()
        weight = module.second.weight
        model = from_spec("allreduce", module, communicator=communicator)
        loss_of(model, communicator.rank, 0).backward()
        held, copied = weight.grad, weight.grad.clone()
        assert held.untyped_storage().nbytes() > held.nbytes
        model.zero_grad()
        loss_of(model, communicator.rank, 1).backward()
        assert torch.equal(held, copied)
        assert weight.grad is not held
        model.zero_grad()
        for step in range(2):
            loss_of(alone, communicator.rank, step).backward()
        with model.no_sync():
            loss_of(model, communicator.rank, 0).backward()
            held = weight.grad
        loss_of(model, communicator.rank, 1).backward()
        sums = communicator.all_gather_object(alone.second.weight.grad)
        assert torch.allclose(held, sums[communicator.rank])
        assert torch.allclose(weight.grad, sum(sums) / communicator.size)
        model.zero_grad(set_to_none=False)
        model.close()

    run_ranks(2, rank)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9))
        self.head = nn.Linear(9, 3)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def by_parts(model: Algorithm, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.module.head(model.module.encoder(x))
    return out


def by_module(model: Algorithm, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.module(x)
    return out


@pytest.mark.parametrize("spec", ["allreduce", "local_sgd:interval=1", "d2"])
@pytest.mark.parametrize("call", [by_parts, by_module])
def test_loops_that_call_parts(spec: str, call: Callable[[Algorithm, torch.Tensor], torch.Tensor]) -> None:
    """Exchanges are those of a loop that calls the wrapper; hooks of what is not called are not."""

    def rank(communicator: Communicator) -> None:
        ends, called = [], list[str]()
        for whole in (True, False):
            module = Parts()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            # Neither loop reads what `broadcast_buffers` would make equal.
            model = from_spec(spec, module, optimizer, communicator=communicator)
            for name, part in {"wrapper": model, "module": module, "encoder": module.encoder}.items():
                part.register_forward_hook(lambda *_, name=name: called.append(name))
            for step in range(3):
                optimizer.zero_grad()
                x = batch(communicator.rank, step)
                (model(x) if whole else call(model, x)).square().mean().backward()
                optimizer.step()
                if call is by_parts and not whole:
                    model.wait()
            model.wait()
            assert model.stats().steps == 3
            ends.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
            expected = (
                {"encoder"} | ({"module"} if whole or call is by_module else set()) | ({"wrapper"} if whole else set())
            )
            assert set(called) == expected
            called.clear()
            if spec == "allreduce" and not whole:
                means = communicator.all_gather_object(module.encoder[1].running_mean)
                assert not torch.equal(*means)
            model.close()
        assert torch.equal(*ends)

    run_ranks(2, rank)


@pytest.mark.parametrize("spec", ["local_sgd:interval=1", "d2", "diloco:interval=2"])
def test_gradients_of_before_a_mean_are_warned_of(spec: str) -> None:
    """Once on each rank; not for steps that are skipped."""

    def rank(communicator: Communicator) -> None:
        module = Parts()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = from_spec(spec, module, optimizer, communicator=communicator)
        assert isinstance(model, ModelAlgorithm)
        for _ in range(3):
            model.skip_step()
        for step in range(5):
            by_parts(model, batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        model.close()

    with pytest.warns(RuntimeWarning, match="it was not called since the last step") as caught:
        run_ranks(2, rank)
    assert len(caught) == 2


def test_parts_of_a_closed_algorithm_train_alone() -> None:
    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Parts(), communicator=communicator)
        model.close()
        by_parts(model, batch(communicator.rank, 0)).square().mean().backward()
        mine = communicator.all_gather_object(model.module.head.weight.grad)
        assert not torch.equal(*mine)
        with pytest.raises(RuntimeError, match="was closed"):
            model(batch(communicator.rank, 0))

    run_ranks(2, rank)
