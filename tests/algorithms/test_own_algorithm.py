"""The algorithms that CONTRIBUTING.md shows, as a user would write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bagua_kernels.algorithms import Algorithm, Exchange, GradientAlgorithm, RoundAlgorithm, from_spec
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def example(base: str, most_lines: int) -> dict[str, Any]:
    """The classes of the page's example of a subclass of `base`."""
    blocks = re.findall(r" +```python\n(.*?)```", PAGE, re.DOTALL)
    (block,) = (found for found in blocks if f"({base})" in found)
    lines = [line.removeprefix("   ") for line in block.splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= most_lines
    names: dict[str, Any] = {"__name__": "own"}
    exec("\n".join(lines), names)
    return names


@pytest.fixture
def own() -> Iterator[dict[str, Any]]:
    """The classes of the example on gradients."""
    yield example("GradientAlgorithm", 30)
    del Algorithm.registered["half"]


@pytest.fixture
def elastic() -> Iterator[dict[str, Any]]:
    """The classes of the example on parameters."""
    yield example("RoundAlgorithm", 35)
    del Algorithm.registered["elastic"]


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


LR = 0.1
WRITTEN_AT = 3  # the step before whose forward pass a rank's parameters are written


class Line(torch.nn.Module):
    """Least squares in float64, of two parameters that lie in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
        self.offset = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.slope + self.offset


def flat(module: torch.nn.Module) -> npt.NDArray[np.float64]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().copy()


def simulated(size: int, steps: int, interval: int, written: bool) -> list[npt.NDArray[np.float64]]:
    """Zhang et al., 2015: each rank is pulled to the center, and the center to the mean, from the values before both."""
    x = [np.append(np.linspace(-1, 1, 7), 0.5) for _ in range(size)]
    center = [each.copy() for each in x]
    for step in range(steps):
        if written and step == WRITTEN_AT:
            x = [np.full(8, 0.25) for _ in range(size)]
            center = [each.copy() for each in x]
        for rank in range(size):
            inputs = np.c_[batch(rank, step).double().numpy(), np.ones(4)]
            x[rank] = x[rank] - LR * 2 / 4 * inputs.T @ (inputs @ x[rank])
        if (step + 1) % interval == 0:
            mean = np.mean(x, axis=0)
            x, center = (
                [a + 0.25 * (z - a) for a, z in zip(x, center, strict=True)],
                [z + 0.25 * (mean - z) for z in center],
            )
    return x


def pull(algorithm: RoundAlgorithm, rank: int, first: int, last: int, written: bool = False) -> None:
    for step in range(first, last):
        if written and step == WRITTEN_AT:
            values = {"slope": torch.full((7,), 0.25), "offset": torch.full((1,), 0.25)}
            algorithm.module.load_state_dict(values)
        algorithm.local.optimizer.zero_grad()
        algorithm(batch(rank, step).double()).square().mean().backward()
        algorithm.local.optimizer.step()
    algorithm.wait()


def wrapped(kind: Any, communicator: Communicator, **options: Any) -> Any:
    module = Line()
    return kind(module, torch.optim.SGD(module.parameters(), LR), communicator=communicator, bucket_bytes=8, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("written", [False, True])
def test_an_own_round_does_what_its_formulas_are(
    elastic: dict[str, Any], size: int, interval: int, written: bool
) -> None:
    steps = 7

    def rank(communicator: Communicator) -> npt.NDArray[np.float64]:
        with wrapped(elastic["Elastic"], communicator, interval=interval) as algorithm:
            assert len(algorithm.rounds.all) == 2
            pull(algorithm, communicator.rank, 0, steps, written)
            return flat(algorithm.module)

    found, expected = run_ranks(size, rank), simulated(size, steps, interval, written)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
    assert not np.allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_an_own_round_resumes_bit_for_bit(elastic: dict[str, Any], size: int) -> None:
    def rank(communicator: Communicator) -> None:
        whole = wrapped(elastic["Elastic"], communicator, interval=2)
        again = wrapped(lambda *a, **k: from_spec("elastic:interval=2", *a, **k), communicator)
        assert type(again) is elastic["Elastic"]
        # In the middle of an interval, and of the way from start to center.
        pull(whole, communicator.rank, 0, 3)
        state = whole.algorithm_state_dict()
        assert set(state["vectors"]) == {"center"}
        again.load_algorithm_state_dict(state)
        pull(whole, communicator.rank, 3, 8)
        pull(again, communicator.rank, 3, 8)
        assert np.array_equal(flat(whole.module), flat(again.module))
        centers = [each.algorithm_state_dict()["vectors"]["center"] for each in (whole, again)]
        assert all(torch.equal(centers[0][name], centers[1][name]) for name in ("slope", "offset"))
        assert not np.array_equal(flat(whole.module), np.append(centers[0]["slope"], centers[0]["offset"]))
        again.close()
        whole.close()

    run_ranks(size, rank)


def test_an_own_round_begins_anew_after_synchronize(elastic: dict[str, Any]) -> None:
    def rank(communicator: Communicator) -> None:
        with wrapped(elastic["Elastic"], communicator) as algorithm:
            pull(algorithm, communicator.rank, 0, 2)
            algorithm.synchronize()
            center = algorithm.algorithm_state_dict()["vectors"]["center"]
            assert np.array_equal(flat(algorithm.module), np.append(center["slope"], center["offset"]))

    run_ranks(2, rank)
