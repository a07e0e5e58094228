"""A rank that is slow on its way out of a rest, while another has written parameters and waits in the next one."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels.comm import Communicator, run_ranks
from tests import limits
from tests.algorithms.asynchronous.common import ALL, flat, made, quiet, train
from tests.algorithms.ranks import Odd
from tests.grids import grid

RANKS = 3
SLOW = 1


def comes_late(model: Any) -> None:
    """Lets the next rest end only when another rank waits for this one to take what was written."""
    average = model.averages.average
    rest = average.rest

    def late(**options: Any) -> Any:
        found = rest(**options)
        del average.rest
        limits.until(lambda: model.averages._waiting, "a letter of a rank that has written parameters", limit=20)
        return found

    average.rest = late


@grid(name=list(ALL))
def test_a_letter_of_the_next_rest_is_not_one_of_this(name: str) -> None:
    """All ranks load a state after a call, and rest once for each."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(ALL[name], communicator, lr=0.0)
        average = model.averages.average
        quiet(model)
        train(model, optimizer, communicator.rank, range(2))
        if communicator.rank == SLOW:
            comes_late(model)
        model.algorithm_state_dict()
        number = average.rest_number
        module.load_state_dict(Odd(9).state_dict())
        train(model, optimizer, communicator.rank, range(2, 3))
        model.synchronize()
        assert average.rest_number == number + 2
        model.close()
        return flat(module)

    for found in run_ranks(RANKS, rank, timeout=limits.seconds(30)):
        assert float((found - flat(Odd(9))).abs().max()) <= 2e-5
