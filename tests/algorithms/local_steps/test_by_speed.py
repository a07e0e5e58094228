"""Ranks of different speed: their steps and their weights."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import DiLoCo, LocalSGD, PostLocalSGD, SparseLoCo
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.comm import Communicator, Membership, run_ranks
from tests.algorithms import parts
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.clocked import Clock, N, Vector, on_clock
from tests.grids import grid


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=N)


def trained(
    communicator: Communicator, seconds: Any, rounds: int, interval: int, kind: Any = LocalSGD, **options: Any
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Trains by given gradients, on a clock of the rank's own; returns the steps of all ranks, and the parameters, by round."""
    module, clock = Vector(), Clock()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = kind(module, optimizer, interval=interval, communicator=communicator, by_speed=True, **options)
    on_clock(model, clock)
    steps, seen, taken = [], [], 0
    for turn in range(rounds):
        steps.append(model.steps_of_ranks)
        for _ in range(model.steps_of_ranks[communicator.rank]):
            model()
            module.x.grad = torch.from_numpy(gradient(communicator.rank, taken)).float()
            clock.now += seconds(communicator.rank, turn)
            optimizer.step()
            taken += 1
        model.wait()
        seen.append(flat(module))
    model.close()
    return steps, seen


def simulated(steps: list[list[int]]) -> list[np.ndarray]:
    """Means of the ranks' changes, weighed by their steps, in float64."""
    start, seen, taken = np.zeros(N), [], [0] * len(steps[0])
    for counts in steps:
        total = np.zeros(N)
        for rank, count in enumerate(counts):
            change = -0.1 * sum(gradient(rank, taken[rank] + k) for k in range(count))
            total += count * change
            taken[rank] += count
        start = start + total / sum(counts)
        seen.append(start.copy())
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_and_weights_follow_speeds(size: int) -> None:
    """The last rank takes three times as long for a step; the first two rounds are equal, for nothing is known yet."""
    everyone = run_ranks(size, trained, lambda rank, turn: 3.0 if rank == size - 1 else 1.0, 5, 12)
    steps = everyone[0][0]
    speeds = np.array([1.0] * (size - 1) + [1 / 3])
    assert steps[:2] == [[12] * size] * 2
    assert steps[2:] == [[round(12 * s / speeds.mean()) for s in speeds]] * 3
    for its_steps, seen in everyone:
        assert its_steps == steps
        for ours, expected, first in zip(seen, simulated(steps), everyone[0][1], strict=True):
            assert torch.equal(ours, first)
            assert np.abs(ours.double().numpy() - expected).max() <= 1e-6


@grid(kind=[LocalSGD, DiLoCo, SparseLoCo], size=[2, 4], delay=[0, 2])
def test_equal_speeds_are_the_fixed_number_bit_for_bit(kind: Any, size: int, delay: int) -> None:
    """Times that differ by some percent count as equal."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        seconds = lambda rank, turn: 1.0 + 0.02 * ((rank + turn) % 3)  # noqa: E731
        steps, seen = trained(communicator, seconds, 4, 5, kind, delay=delay)
        assert steps == [[5] * size] * 4
        module = Vector()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = kind(module, optimizer, interval=5, communicator=communicator.duplicate(), delay=delay)
        for step in range(20):
            model()
            module.x.grad = torch.from_numpy(gradient(communicator.rank, step)).float()
            optimizer.step()
            if step % 5 == 4:
                model.wait()  # as `trained` does at the end of each round
        return seen[-1], flat(module)

    for by_speed, fixed in run_ranks(size, rank):
        assert torch.equal(by_speed, fixed)


def test_a_rank_takes_at_least_as_many_steps_as_an_exchange_lasts() -> None:
    run = functools.partial(trained, delay=2)
    steps, _ = run_ranks(2, run, lambda rank, turn: 100.0 if rank else 1.0, 4, 8)[0]
    assert steps[-1] == [16, 3]


def test_speeds_that_change() -> None:
    """Rank 1 becomes slow in its third round: the fifth is the first of which all know it."""
    steps, _ = run_ranks(2, trained, lambda rank, turn: 4.0 if rank and turn >= 2 else 1.0, 6, 10)[0]
    assert steps[:4] == [[10, 10]] * 4
    assert steps[4:] == [[16, 4]] * 2


def test_an_exchange_that_ends_early_on_one_rank_changes_no_plan() -> None:
    """On the last rank all rounds have been exchanged before the next one is begun."""

    def rank(communicator: Communicator) -> list[list[int]]:
        module, clock = Vector(), Clock()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = LocalSGD(module, optimizer, interval=6, communicator=communicator, by_speed=True)
        on_clock(model, clock)
        runtime = parts.outer_rounds(model)._runtime
        begin = runtime.start

        def late(*args: Any) -> Any:
            task = begin(*args)
            task.done.wait()
            return task

        if communicator.rank == communicator.size - 1:
            runtime.start = late
        steps = []
        for turn in range(5):
            steps.append(model.steps_of_ranks)
            for _ in range(model.steps_of_ranks[communicator.rank]):
                model()
                module.x.grad = torch.ones(N)
                clock.now += 1.0 + 2.0 * (communicator.rank + turn)
                optimizer.step()
            model.wait()
        model.close()
        return steps

    first, *others = run_ranks(3, rank)
    assert first[2] != first[0]
    assert all(steps == first for steps in others)


def test_waiting_is_no_work() -> None:
    """A rank that has waited for the others is not slow."""
    clock = Clock()
    pace = Pace(4, 0, 2, 1, clock)
    clock.now = 10.0
    assert pace.speed(waited=6.0) == 1.0
    pace.next_round(pace.planned(), waited=6.0)
    clock.now = 14.0
    assert pace.speed(waited=6.0) == 1.0


def test_weights_by_samples() -> None:
    """`count_samples` says how many there were; without it each step counts as one."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Vector()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = LocalSGD(module, optimizer, interval=2, communicator=communicator, by_speed=True)
        for step in range(2):
            model()
            model.count_samples(1 + 2 * communicator.rank)
            module.x.grad = torch.from_numpy(gradient(communicator.rank, step)).float()
            optimizer.step()
        model.wait()
        model.close()
        return flat(module)

    changes = [-0.1 * (gradient(rank, 0) + gradient(rank, 1)) for rank in range(3)]
    expected = np.average(changes, axis=0, weights=[1, 3, 5])
    for x in run_ranks(3, rank):
        assert np.abs(x.double().numpy() - expected).max() <= 1e-6


def test_speeds_are_resumed() -> None:
    pace, again = (Pace(6, 1, 2, 1, Clock()) for _ in range(2))
    pace.measured([3.0, 1.0])
    pace.next_round(pace.planned(), 0.0)
    pace.next_round(pace.planned(), 0.0)
    again.load(pace.numbers())
    for each in (pace, again):
        each.next_round(each.planned(), 0.0)
    assert again.numbers() == pace.numbers()
    assert again.steps == [9, 3]
    again.restart(100)
    assert again.steps == [6, 6]
    assert again.is_end(105)


def test_what_is_refused() -> None:
    module = Vector()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="by_speed is for rounds of many steps"):
        PostLocalSGD(module, optimizer, first_phase=3, by_speed=True)

    def rank(communicator: Communicator) -> None:
        model = LocalSGD(module, optimizer, by_speed=True, communicator=communicator)
        with pytest.raises(RuntimeError, match="RoundSampler ends all at the same round"), model.join():
            pass

    run_ranks(1, rank)


def test_waits_before_a_change_of_members_are_no_work() -> None:
    """Ranks that have waited long before another one is lost have the same speeds as ever."""

    def rank(communicator: Communicator) -> list[list[int]] | None:
        members = Membership(communicator)
        module = Vector()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options: Any = {"communicator": members.communicator, "on_failure": "heal"}
        model = LocalSGD(module, optimizer, interval=4, by_speed=True, **options)
        model.local.wait_seconds = 1000.0 * communicator.rank
        steps = []
        for step in range(20):
            if communicator.rank == 2 and step == 5:
                return None
            model()
            module.x.grad = torch.ones(N)
            time.sleep(0.005)
            optimizer.step()
            steps.append(model.steps_of_ranks)
        model.close()
        members.prepare_close()
        members.close()
        return steps

    for steps in run_ranks(3, rank):
        assert steps is None or all(min(each) > 1 for each in steps if len(each) == 2), steps
