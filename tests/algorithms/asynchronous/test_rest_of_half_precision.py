"""What parameters of half precision are too short for is owed to them, until it is long enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage
from bagua_kernels.algorithms.asynchronous.published_model import PublishedModel
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.comm import Communicator, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox.triggered import Execution
from tests.algorithms import parts
from tests.grids import grid

N = 8


def opened(communicator: Communicator, dtype: torch.dtype) -> tuple[PublishedModel, torch.Tensor]:
    parameter = nn.Parameter(torch.ones(N, dtype=dtype))
    model = PublishedModel(FlatParameters({"x": parameter}), open_mailbox(communicator))
    model.end_write()
    return model, parameter


@grid(dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_small_debts_add_up(dtype: torch.dtype) -> None:
    """A hundred changes of 2^-14, each below half a unit in the last place of 1 in half precision."""

    def rank(communicator: Communicator) -> None:
        model, parameter = opened(communicator, dtype)
        for _ in range(256):
            model.owe([torch.full((N,), 2.0**-14)])
            model.bring_in()
        assert parameter.tolist() == [1 + 2.0**-6] * N

    run_ranks(1, rank)


@grid(dtype=[torch.bfloat16, torch.float16])
def test_what_a_fresh_mean_lacks_stays_owed(dtype: torch.dtype) -> None:
    """The mean is that of what was read, which lacked it."""

    def rank(communicator: Communicator) -> None:
        model, parameter = opened(communicator, dtype)
        read = model.buffers()
        for step in range(256):
            model.owe([torch.full((N,), 2.0**-14)])
            model.read(read)
            model.receive(Execution(step, (0, 1), -1, True), read, [each.clone() for each in read])
            model.bring_in()
        assert parameter.tolist() == [1 + 2.0**-6] * N

    run_ranks(1, rank)


@pytest.mark.parametrize("kind", [AsyncDecentralized, AsyncModelAverage])
def test_a_checkpoint_has_the_rest_and_a_mean_uses_it(kind: Any) -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Linear(N, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        model = kind(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator)
        # On both ranks a rest of 3/8 of a unit, and on one a unit more: the mean is nearer to the next number.
        parts.averages(model).model.owe([torch.full((N,), 2.0**-7 * (0.375 + communicator.rank))])
        state = model.algorithm_state_dict()
        assert state["vectors"]["debt"]["weight"].tolist() == [0.375 * 2.0**-7] * N
        model.load_algorithm_state_dict(state)
        assert model.algorithm_state_dict()["vectors"]["debt"]["weight"].tolist() == [0.375 * 2.0**-7] * N
        model.synchronize()
        assert module.weight.tolist() == [[1 + 2.0**-7] * N]
        assert model.algorithm_state_dict()["vectors"]["debt"]["weight"].tolist() == [0.0] * N
        model.close()

    run_ranks(2, rank)
