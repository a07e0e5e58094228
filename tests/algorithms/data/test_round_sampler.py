"""Batches of ranks of different speed, round after round: none is drawn twice, and none is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import LocalSGD, RoundSampler
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.local_steps.clocked import Clock, N, Vector, on_clock
from tests.grids import grid


def dealt(communicator: Communicator, seconds: Any, samples: int, batch: int, epochs: int) -> list[list[list[int]]]:
    """Trains through some epochs; returns the batches of each."""
    module, clock = Vector(), Clock()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = LocalSGD(module, optimizer, interval=3, communicator=communicator, by_speed=True)
    on_clock(model, clock)
    sampler = RoundSampler(samples, batch, model, seed=3)
    drawn = []
    for _ in range(epochs):
        drawn.append([])
        for indices in sampler:
            drawn[-1].append(indices)
            model()
            module.x.grad = torch.ones(N)
            clock.now += seconds(communicator.rank)
            optimizer.step()
    model.close()
    return drawn


@pytest.mark.slow
@grid(size=[1, 2, 3, 5], samples=[17, 100, 301], batch=[1, 4])
def test_samples_are_disjoint_and_complete(size: int, samples: int, batch: int) -> None:
    """Whatever the speeds: the first `samples` that are drawn are each sample once, and so are the next."""
    everyone = run_ranks(size, dealt, lambda rank: 1.0 + rank, samples, batch, 3)
    # All ranks end an epoch with the same round.
    drawn = sum(len(indices) for epochs in everyone for batches in epochs for indices in batches)
    counts = np.bincount(
        [i for epochs in everyone for batches in epochs for b in batches for i in b], minlength=samples
    )
    assert drawn >= 3 * samples
    assert counts.min() >= drawn // samples
    assert counts.max() <= -(-drawn // samples)
    if size > 1 and samples > 100:
        taken = [sum(len(batches) for batches in epochs) for epochs in everyone]
        assert taken == sorted(taken, reverse=True)
        assert taken[0] > 1.3 * taken[-1]


def test_epochs_are_shuffled_anew() -> None:
    (epochs,) = run_ranks(1, dealt, lambda rank: 1.0, 30, 3, 2)
    first, second = ([i for b in batches for i in b][:20] for batches in epochs)
    assert first != second
    assert first != sorted(first)


def test_a_loader_that_draws_ahead_is_refused() -> None:
    def rank(communicator: Communicator) -> None:
        module = Vector()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = LocalSGD(module, optimizer, interval=2, communicator=communicator, by_speed=True)
        with pytest.raises(RuntimeError, match="after this rank's 2 steps, got a request for a batch before"):
            list(RoundSampler(100, 4, model))
        model.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("stop", [6, 8])
def test_a_sampler_goes_on_in_the_middle_of_a_round_or_at_its_end(stop: int) -> None:
    def rank(communicator: Communicator, stops: tuple[int, ...]) -> list[list[int]]:
        state: Any = None
        drawn: list[list[int]] = []
        for end in stops:
            module = Vector()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = LocalSGD(module, optimizer, interval=4, communicator=communicator.duplicate(), by_speed=True)
            on_clock(model, Clock())
            sampler = RoundSampler(1000, 2, model)
            if state is not None:
                model.load_algorithm_state_dict(state[0])
                sampler.load_state_dict(state[1])
            for indices in sampler:
                drawn.append(indices)
                model()
                module.x.grad = torch.ones(N)
                optimizer.step()
                if len(drawn) == end:
                    break
            state = model.algorithm_state_dict(), sampler.state_dict()
            model.close()
        return drawn

    whole, resumed = (run_ranks(2, rank, stops) for stops in ((11,), (stop, 11)))
    assert whole == resumed


def test_numbers_below_one_are_refused() -> None:
    def rank(communicator: Communicator) -> None:
        module = Vector()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = LocalSGD(module, optimizer, by_speed=True, communicator=communicator)
        with pytest.raises(ValueError, match="samples and batch_size must be at least 1"):
            RoundSampler(0, 4, model)

    run_ranks(1, rank)
