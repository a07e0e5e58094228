"""The algorithm that CONTRIBUTING.md shows, as a user would write it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Algorithm, Exchange, GradientAlgorithm, from_spec
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
MOST_LINES = 30


@pytest.fixture
def own() -> Iterator[dict[str, Any]]:
    """The classes of the page's example."""
    (block,) = (
        found for found in re.findall(r" +```python\n(.*?)```", PAGE, re.DOTALL) if "GradientAlgorithm" in found
    )
    lines = [line.removeprefix("   ") for line in block.splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "own"}
    exec("\n".join(lines), names)
    yield names
    del Algorithm.registered["half"]


def train(algorithm: GradientAlgorithm, rank: int, first: int, last: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
    for step in range(first, last):
        optimizer.zero_grad()
        algorithm(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in algorithm.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_it_trains_and_resumes(own: dict[str, Any], size: int) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        whole = from_spec("half", Odd(), communicator=communicator, bucket_bytes=600)
        train(whole, communicator.rank, 0, 3)
        again = own["HalfAllReduce"](Odd(), communicator=communicator, bucket_bytes=600)
        again.module.load_state_dict(whole.module.state_dict())
        again.load_algorithm_state_dict(whole.algorithm_state_dict())
        expected, found = (train(each, communicator.rank, 3, 6) for each in (whole, again))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        return found

    first, *others = run_ranks(size, rank)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_bare_loop_drives_its_exchange(own: dict[str, Any]) -> None:
    """Without a module, a wrapper or an engine. What was applied and what is remembered add up to all that was given."""
    steps, size = 5, 3

    def given(rank: int, step: int) -> torch.Tensor:
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + rank))

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = Bucket([torch.empty(5, 7)], align=1, names=["w"])
        exchange: Exchange = own["HalfExchange"](bucket, communicator)
        applied = torch.zeros(5, 7)
        for step in range(steps):
            bucket.fill(0, given(communicator.rank, step))
            for work in exchange.run(step):
                work.wait()
            applied += bucket.views[0]
        return applied, exchange.state()["residual"]["w"].view(5, 7)

    everyone = run_ranks(size, rank)
    assert all(torch.equal(applied, everyone[0][0]) for applied, _ in everyone)
    still = sum(residual for _, residual in everyone) / size
    total = sum(given(r, step) for r in range(size) for step in range(steps)) / size
    # The mean of halves is rounded to half of the bits itself.
    assert torch.allclose(everyone[0][0] + still, total, atol=0.05)
    assert not torch.allclose(everyone[0][0], total, atol=1e-4)
