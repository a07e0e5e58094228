"""How trainings by asynchronous algorithms end: by exceptions, and after different times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import RankLostError
from tests import limits
from tests.algorithms.asynchronous.common import ALL, Make, flat, made, train
from tests.algorithms.ranks import Odd
from tests.grids import grid, only

every = grid(cover=1, make=ALL)
several = pytest.mark.parametrize("name", only(ALL, "wagma", "average, codec", "pairs"))


@every
def test_an_exception_on_one_rank_ends_all(make: Make) -> None:
    """Others raise at a step, or at the end, and name the rank."""

    def rank(communicator: Communicator) -> str:
        module, optimizer, model = made(make, communicator)
        try:
            with model:
                for step in range(200):
                    if communicator.rank == 1 and step == 5:
                        raise ZeroDivisionError("of this rank")
                    train(model, optimizer, communicator.rank, range(step, step + 1))
        except ZeroDivisionError:
            return "own"
        except RankLostError as error:
            # Ranks that fail for its loss are named, too.
            return "lost" if 1 in error.ranks else f"other ranks: {error.ranks}"
        return "nothing"

    assert run_ranks(3, rank, timeout=limits.seconds(5)) == ["lost", "own", "lost"]


@every
def test_an_exception_within_a_step_is_no_deadlock(make: Make) -> None:
    """The optimizer raises between its hooks, the program catches that, and goes on."""

    class Raising(torch.optim.SGD):
        raises = False

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                self.raises = False
                raise ZeroDivisionError("of the optimizer")
            return super().step(closure)

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Odd()
        optimizer = Raising(module.parameters(), lr=0.05)
        with make(module, optimizer, communicator=communicator) as model:
            for step in range(12):
                optimizer.raises = step >= 4 and communicator.rank == 1 and step % 4 == 0
                try:
                    train(model, optimizer, communicator.rank, range(step, step + 1))
                except ZeroDivisionError:
                    continue
            model.synchronize()
        return flat(module)

    everyone = run_ranks(3, rank, timeout=limits.seconds(10))
    assert all(torch.equal(each, everyone[0]) for each in everyone)


@pytest.mark.slow
@several
def test_ranks_that_train_longer_than_the_timeout(name: str) -> None:
    """One rank ends at once, the others train five times as long as the timeout."""
    timeout = limits.seconds(0.5)

    def rank(communicator: Communicator) -> None:
        module, optimizer, model = made(ALL[name], communicator)
        with model:
            for step in range(3 if communicator.rank == 0 else 25):
                train(model, optimizer, communicator.rank, range(step, step + 1))
                time.sleep(0.0 if communicator.rank == 0 else timeout / 5)

    run_ranks(3, rank, timeout=timeout)
