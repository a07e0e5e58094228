"""PowerSGD that makes one factor in each step: its messages, and states of the other kind of steps."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from bagua_kernels.algorithms import PowerSGD
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import fold_seed
from bagua_kernels.compression.powersgd.orthonormal import gaussian, name_number
from tests.algorithms.ranks import batch, fill
from tests.grids import grid

ROWS, COLUMNS = 512, 256


def wrapped(communicator: Communicator, **options: bool) -> PowerSGD:
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    fill(module)
    return PowerSGD(module, communicator=communicator, **options)


def gradient(algorithm: PowerSGD, rank: int, step: int) -> torch.Tensor:
    """The mean of a step, which begins at the same weights each time."""
    algorithm.zero_grad()
    algorithm(batch(rank, step, COLUMNS)).square().mean().backward()
    found = algorithm.module.weight.grad
    assert isinstance(found, torch.Tensor)
    return found.clone()


def test_messages_have_the_size_of_a_side() -> None:
    def rank(communicator: Communicator) -> list[int]:
        algorithm = wrapped(communicator, alternate=True)
        sent = [0]
        for step in range(4):
            gradient(algorithm, communicator.rank, step)
            sent.append(algorithm.stats().bytes_sent)
        return [b - a for a, b in itertools.pairwise(sent)]

    for found, side in zip(run_ranks(4, rank)[0], (ROWS, COLUMNS) * 2, strict=True):
        factor = 2 * 3 / 4 * 4 * side
        assert factor <= found <= factor + 256


@grid(cover=1, steps=[1, 2], alternate=[True, False])
def test_a_state_of_other_steps_is_taken_over(alternate: bool, steps: int) -> None:
    """Its right factors are what the first step projects onto, and its residuals are added."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, ...]:
        first = wrapped(communicator, alternate=not alternate)
        for step in range(steps):
            gradient(first, communicator.rank, step)
        state = first.algorithm_state_dict()
        second = wrapped(communicator, alternate=alternate)
        second.load_algorithm_state_dict(state)
        out = gradient(second, communicator.rank, steps)
        plain = nn.Linear(COLUMNS, ROWS, bias=False)
        fill(plain)
        plain(batch(communicator.rank, steps, COLUMNS)).square().mean().backward()
        assert plain.weight.grad is not None
        vectors = state["vectors"]
        m = plain.weight.grad + vectors["residual"]["weight"].view(ROWS, COLUMNS)
        kept = second.algorithm_state_dict()["vectors"]["residual"]["weight"].view(ROWS, COLUMNS)
        return out, m, kept, vectors["right"]["weight"].view(COLUMNS, 1)

    everyone = run_ranks(2, rank)
    out, _, _, right = everyone[0]
    if not right.any():
        # One step in turn has made P alone.
        right = torch.from_numpy(gaussian(fold_seed(0, 0, name_number("weight")), right.shape))
    mean = torch.stack([m for _, m, _, _ in everyone]).double().mean(0)
    q = right.double() / right.double().norm()
    p = mean @ q
    basis = p / p.norm()
    expected = p @ q.T if alternate else basis @ (basis.T @ mean)
    assert float((out - expected).norm()) <= 1e-4 * float(expected.norm())
    for other, m, kept, _ in everyone:
        assert torch.equal(out, other)
        assert float((m - out - kept).norm()) <= 1e-5 * float(m.norm())
