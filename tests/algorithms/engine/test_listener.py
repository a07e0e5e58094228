"""Listeners of the engine and of the hook: each pass ends once, with its seconds, and while no exchange is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.engine.listener import PassTimer
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, loss_of


class Notes:
    """Writes down what it is called with."""

    compares = True

    def __init__(self) -> None:
        self.algorithm: GradientAllReduce | None = None
        self.ended: list[tuple[int, float]] = []

    def pass_ended(self, step: int, seconds: float, communicator: Communicator) -> None:
        assert self.algorithm is not None
        assert self.algorithm._engine is not None
        # Raises if an exchange is under way.
        self.algorithm._engine.check_idle()
        assert communicator is self.algorithm._engine.communicators[0]
        assert self.algorithm.stats().steps == step + 1
        self.ended.append((step, seconds))


class Heard(GradientAllReduce):
    """Exact means, and notes of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.listener = Notes()
        super().__init__(*arguments, **options)
        self.listener.algorithm = self


class Clock:
    """One second further at each look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_each_pass_ends_once() -> None:
    """Also those in which a rank that has joined mirrors others, but none without exchanges."""

    def rank(communicator: Communicator) -> list[tuple[int, float]]:
        algorithm = Heard(Odd(), communicator=communicator)
        assert algorithm._engine is not None
        algorithm._engine.timer.clock = Clock()
        with algorithm.join():
            for step in range(2 + communicator.rank):
                with algorithm.no_sync():
                    loss_of(algorithm, communicator.rank, step).backward()
                loss_of(algorithm, communicator.rank, step).backward()
        algorithm.close()
        assert isinstance(algorithm.listener, Notes)
        return algorithm.listener.ended

    assert run_ranks(2, rank) == [[(0, 1.0), (1, 1.0), (2, 1.0)]] * 2


def test_an_error_of_a_listener_ends_training() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = Heard(Odd(), communicator=communicator)
        assert isinstance(algorithm.listener, Notes)
        algorithm.listener.algorithm = None
        with pytest.raises(AssertionError):
            loss_of(algorithm, communicator.rank, 0).backward()
        with pytest.raises(RuntimeError, match="backward pass"):
            loss_of(algorithm, communicator.rank, 1).backward()
        algorithm.close()

    run_ranks(2, rank)


@pytest.mark.parametrize(("compares", "waits"), [(True, 2), (False, 0), (None, 0)])
def test_a_gpu_is_waited_for_while_passes_are_compared(
    compares: bool | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    listener = None
    if compares is not None:
        listener = Notes()
        listener.compares = compares
    device = torch.device("cuda", 0)
    timer = PassTimer(listener, device)
    timer.clock = Clock()
    timer.begin()
    assert timer.taken() == 1.0
    assert waited == [device] * waits
