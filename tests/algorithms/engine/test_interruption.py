"""What follows when a backward pass breaks off while gradients are exchanged."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, GradientAllReduce, PowerSGD
from bagua_kernels.algorithms.engine.buckets import fill
from bagua_kernels.algorithms.engine.interruption import Interruption
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work, run_ranks
from bagua_kernels.errors import CommunicationError
from tests.algorithms.ranks import Odd, batch

TINY = {"bucket_bytes": 1}
CURE = r"restart from a checkpoint, or close\(\) this wrapper"


def loss(algorithm: nn.Module, communicator: Communicator, step: int = 0) -> torch.Tensor:
    return algorithm(batch(communicator.rank, step)).square().mean()


class Failing(GradientAllReduce):
    """Fails in its second step, in the second bucket."""

    name = "failing"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        class Cut(Mean):
            def run(self, step: int) -> Iterator[Work]:
                if step == 1 and bucket.index == 1:
                    raise CommunicationError("the wire is cut")
                yield from super().run(step)

        return Cut(bucket, communicator)


def check_refused(algorithm: Algorithm, optimizers: list[torch.optim.Optimizer], communicator: Communicator) -> None:
    module = algorithm.module
    assert all(p.grad is None for p in module.parameters())
    before = [p.clone() for p in module.parameters()]
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match=CURE):
            optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=CURE):
            loss(algorithm, communicator)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    # Others' optimizers go on.
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    assert float(other.detach()[0]) < 1
    # What is there can be saved, for a diagnosis.
    assert set(algorithm.state_dict()) == {f"module.{name}" for name in module.state_dict()}
    assert algorithm.stats().steps == 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_gradients_of_a_failed_exchange_are_dropped(in_flight: int) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        algorithm = Failing(module, communicator=communicator, in_flight=in_flight, **TINY)
        optimizers = [torch.optim.AdamW(module.parameters()), optim.AdamW(module.parameters())]
        loss(algorithm, communicator).backward()
        for optimizer in optimizers:
            optimizer.step()
        with pytest.raises(CommunicationError, match="the wire is cut") as caught:
            loss(algorithm, communicator).backward()
        assert "gradients of this backward pass were dropped" in caught.value.__notes__[0]
        check_refused(algorithm, optimizers, communicator)
        algorithm.close()
        # A new start.
        optimizers[0].step()

    run_ranks(2, rank)


def test_half_a_step_is_told() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        options = {"apply_in_backward": True, "in_flight": 1}
        algorithm = Failing(module, optimizer, communicator=communicator, **TINY, **options)
        loss(algorithm, communicator).backward()
        second = loss(algorithm, communicator)
        with pytest.raises(CommunicationError, match="the wire is cut") as caught:
            second.backward()
        (note,) = caught.value.__notes__
        assert re.search("[123] of 4 parameters have been updated in that pass", note)
        with pytest.raises(RuntimeError, match=r"[123] of 4 parameters have been updated.*the others have not"):
            optimizer.step()
        check_refused(algorithm, [optimizer, torch.optim.SGD(module.parameters(), lr=0.1)], communicator)
        algorithm.close()

    run_ranks(2, rank)


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")


class Breaks(nn.Module):
    """Whose backward pass breaks off after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7))
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[2](Breaking.apply(self.layers[1](first)) if self.breaks else self.layers[1](first))


@pytest.mark.parametrize("wrap", [GradientAllReduce, ByteGrad, PowerSGD])
def test_an_exception_of_the_users_in_backward(wrap: Callable[..., Algorithm]) -> None:
    """On all ranks at once, and nobody tells the engine: PyTorch does not call back."""

    def rank(communicator: Communicator) -> None:
        module = Breaks()
        algorithm = wrap(module, communicator=communicator, **TINY)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            module.breaks = step == 1
            if step:
                with pytest.raises(MemoryError):
                    loss(algorithm, communicator).backward()
            else:
                loss(algorithm, communicator).backward()
                optimizer.step()
        check_refused(algorithm, [optimizer], communicator)
        algorithm.close()

    run_ranks(2, rank)


def test_no_gradient_appears_after_they_were_dropped() -> None:
    """On a communication thread that fills a bucket when backward has ended already, not even for a moment."""

    class Watched(nn.Parameter):
        given: list[torch.Tensor]

        def __setattr__(self, name: str, value: object) -> None:
            if name == "grad" and isinstance(value, torch.Tensor):
                self.given.append(value)
            super().__setattr__(name, value)

    parameter = Watched(torch.zeros(3))
    parameter.given = []
    bucket, gradient = Bucket([parameter], align=1), torch.ones(3)
    interruption = Interruption([parameter])
    fill(bucket, [(0, gradient, parameter)], 1.0, interruption=interruption)
    assert parameter.grad.is_set_to(bucket.views[0])
    assert len(parameter.given) == 1
    interruption.happen(None, ())
    fill(bucket, [(0, gradient, parameter)], 1.0, interruption=interruption)
    assert parameter.grad is None
    assert len(parameter.given) == 1
    interruption.remove()


def test_nothing_follows_if_no_exchange_had_begun() -> None:
    def rank(communicator: Communicator) -> None:
        module = Breaks()
        algorithm = GradientAllReduce(module, communicator=communicator)
        module.breaks = True
        with pytest.raises(MemoryError):
            loss(algorithm, communicator).backward()
        module.breaks = False
        algorithm.zero_grad()
        loss(algorithm, communicator).backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert algorithm.stats().steps == 1
        algorithm.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("apply_in_backward", [False, True])
def test_a_rank_that_waits_for_others_can_close(apply_in_backward: bool) -> None:
    """Rank 0's exchange waits for rank 1, whose backward pass broke off; `close` ends both."""
    broken = threading.Event()

    def rank(communicator: Communicator) -> str:
        module = Breaks()
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        algorithm = GradientAllReduce(
            module, optimizer, communicator=communicator, apply_in_backward=apply_in_backward, **TINY
        )
        loss(algorithm, communicator).backward()
        module.breaks = communicator.rank == 1
        try:
            loss(algorithm, communicator).backward()
        except MemoryError:
            broken.set()
            algorithm.close()
            return "broke off"
        except CommunicationError as error:
            assert broken.is_set()
            assert all(p.grad is None for p in module.parameters())
            algorithm.close()
            return str(error.__notes__)
        return "nothing happened"

    first, second = run_ranks(2, rank)
    assert second == "broke off"
    assert "restart from a checkpoint" in first


def test_the_range_of_waiting_is_seen_by_profilers() -> None:
    def rank(communicator: Communicator) -> list[str]:
        algorithm = ByteGrad(Odd(), communicator=communicator)
        loss(algorithm, communicator).backward()
        if communicator.rank:
            loss(algorithm, communicator, 1).backward()
            return []
        # A profiler is the process's, but sees ranges of the thread that has begun it only.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss(algorithm, communicator, 1).backward()
        return [event.name for event in profile.events() if event.name.endswith(".wait")]

    assert run_ranks(2, rank)[0] == ["ByteGrad.wait"]
