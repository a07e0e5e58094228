"""Elements whose momentum is stopped or bounded after the freeze."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.adam.simulation import Given, Kind, both, draw, parameters
from tests.grids import grid


def dead(step: int, rank: int, size: float = 0.0) -> torch.Tensor:
    """A gradient with 10 elements of constantly zero or little gradient."""
    gradient = draw(step, rank, (16, 16))
    gradient.view(-1)[:10] = size
    return gradient


@both
def test_elements_without_gradient_stay_exactly_put(kind: Kind) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5)
        for step in range(60):
            model.optimizer.zero_grad()
            # After the freeze they may have one.
            model(w=dead(step, communicator.rank, 1e-3 if step > 40 else 0.0)).backward()
            model.optimizer.step()
        return parameters(model.module)["w"]

    first, second = run_ranks(2, rank)
    start = parameters(Given(w=(16, 16)))["w"]
    assert torch.equal(first, second)
    assert torch.equal(first.view(-1)[:10], start.view(-1)[:10])
    assert (first != start).view(-1)[10:].all()


@both
@grid(cover=1, mask={"none": False, "given": {"w": torch.ones(16, 16)}})
def test_elements_without_gradient_are_caught_without_a_mask(kind: Kind, mask: bool | dict[str, torch.Tensor]) -> None:
    def rank(communicator: Communicator) -> None:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5, mask=mask)
        for step in range(5):
            model.optimizer.zero_grad()
            model(w=dead(step, communicator.rank)).backward()
            model.optimizer.step()
        with pytest.raises(
            ValueError, match="10 of the 256 elements of parameter 'w' had no gradient up to the freeze"
        ):
            model(w=dead(5, communicator.rank)).backward()

    run_ranks(2, rank)


@both
def test_given_masks(kind: Kind) -> None:
    """They stop elements at the freeze, whatever their v."""

    def rank(communicator: Communicator) -> None:
        mask = torch.ones(16, 16, dtype=torch.bool)
        mask[3] = False
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5, mask={"w": mask})
        seen = []
        for step in range(9):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (16, 16))).backward()
            model.optimizer.step()
            seen.append(parameters(model.module)["w"])
        assert (seen[4][3] != seen[3][3]).all()
        # Momentum is zero but for the rounding of the gradient that takes it there.
        assert torch.allclose(seen[8][3], seen[4][3], rtol=0, atol=1e-6)
        assert (seen[8] != seen[4])[:3].all()

    run_ranks(2, rank)


@both
def test_no_element_moves_by_more_than_the_limit(kind: Kind) -> None:
    """Where v is tiny, what a codec lacks would be divided by it: steps of 1e5 learning rates."""

    def rank(communicator: Communicator, limit: float) -> float:
        model = kind(Given(w=(16, 16)), communicator=communicator, lr=1e-3, freeze_step=5, limit=limit)
        most = 0.0
        for step in range(30):
            before = parameters(model.module)["w"]
            model.optimizer.zero_grad()
            model(w=dead(step, communicator.rank, 1e-9)).backward()
            model.optimizer.step()
            most = max(most, float((parameters(model.module)["w"] - before).abs().max()))
        return most / 1e-3

    assert run_ranks(2, partial(rank, limit=float("inf")))[0] > 1e4
    # The bias correction of m, 1 / (1 - 0.9^6), is on top.
    assert run_ranks(2, partial(rank, limit=100.0))[0] <= 100 / (1 - 0.9**6) * 1.001
