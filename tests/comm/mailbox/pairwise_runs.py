"""Runs of `PairwiseAverage` among threads, with integers modulo a prime."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels.comm import Communicator, Schedule, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.pairwise import PairwiseAverage, Plain
from tests.comm.mailbox.triggered_runs import PRIME, Model


def exact_half(other: torch.Tensor, own: torch.Tensor) -> None:
    """(other - own) / 2 modulo the prime."""
    other.copy_((other - own) % PRIME * pow(2, -1, PRIME) % PRIME)


def graph(size: int, draws: random.Random) -> list[list[int]]:
    """A connected graph: a chain, and some edges more."""
    edges = {(i, i + 1) for i in range(size - 1)}
    for _ in range(draws.randint(0, size)):
        a, b = draws.randrange(size), draws.randrange(size)
        if a != b:
            edges.add((min(a, b), max(a, b)))
    return [[b if a == i else a for a, b in sorted(edges) if i in (a, b)] for i in range(size)]


def rank(
    communicator: Communicator, seed: int, sleep: Callable[[float], None], pause: Callable[[], None], make: Any
) -> tuple[int, torch.Tensor, int]:
    """Trains one rank, with two rests; returns the sum of what it added, its model, and its exchanges."""
    shared, draws = random.Random(seed), random.Random(f"{seed} {communicator.rank}")
    neighbours = graph(communicator.size, shared)[communicator.rank]
    different = shared.random() < 0.5
    courier = Courier(open_mailbox(communicator))
    model = make(courier, draws.randrange(PRIME), pause)
    average = PairwiseAverage(courier, neighbours, model, seed=seed, wire=Plain(exact_half))
    courier.start()
    total = int(model.x[0])
    for _ in range(2):
        for _ in range(draws.randint(1, 15) if different else 10):
            sleep(draws.choice([0.5, 1.0, 1.0, 3.0]))
            update = draws.randrange(PRIME)
            model.bring_in()
            model.step(update)
            total += update
            average.start()
        average.rest()
        model.bring_in()
        communicator.barrier().wait()
        average.resume()
    average.rest()
    model.bring_in()
    communicator.barrier().wait()
    courier.end()
    return total, model.x, average.exchanges


def scheduled(seed: int, make: Any = Model) -> tuple[Schedule, list[tuple[int, torch.Tensor, int]]]:
    """Runs a seed by a virtual clock."""
    draws = random.Random(seed)
    size, latency = draws.randint(2, 8), draws.choice([0.0, 0.5, 3.0])
    schedule = Schedule(seed, latency=lambda draws: draws.uniform(0, latency))
    results = run_ranks(size, rank, seed, schedule.sleep, schedule.pass_on, make, timeout=300.0, schedule=schedule)
    return schedule, results


def check(results: list[tuple[int, torch.Tensor, int]]) -> None:
    """Asserts what holds for any order of events."""
    total = sum(total for total, _, _ in results) % PRIME
    assert sum(int(x[0]) for _, x, _ in results) % PRIME == total, "the sum is not conserved"
    assert all((x == x[0]).all() for _, x, _ in results)
    assert sum(count for _, _, count in results) > 0
