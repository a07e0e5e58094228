"""How trainings by asynchronous algorithms end: by exceptions, and after different times."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.asynchronous.published_model import PublishedModel
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.comm import Communicator, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox.courier import Courier
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


@pytest.mark.parametrize("ends", ["closed", "a rank is lost"])
def test_two_threads_do_not_wait_for_each_other_after_the_end(ends: str) -> None:
    """A courier for a step that has raised; training for a record that goes on with what the courier would do."""

    def rank(communicator: Communicator) -> None:
        mailbox, entered = open_mailbox(communicator), threading.Event()
        courier = Courier(mailbox)
        order: Any = None if ends == "closed" else SimpleNamespace(is_next=lambda event: False)
        model = PublishedModel(FlatParameters(dict(nn.Linear(2, 3).named_parameters())), mailbox, order=order)
        model.check = courier.check_serving

        def work() -> bool:
            entered.set()
            if ends != "closed":
                raise RankLostError("rank 1 was lost", [1])
            model.read(model.buffers())
            return False

        courier.work(work)
        if ends == "closed":
            model.begin_write()
        courier.start()
        courier.wake()
        assert entered.wait(limits.seconds(20))
        if ends != "closed":
            with pytest.raises(RankLostError, match="rank 1 was lost"):
                model.begin_write()
        courier.end()
        assert not courier._thread.is_alive()

    run_ranks(1, rank, timeout=limits.NEVER)


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
