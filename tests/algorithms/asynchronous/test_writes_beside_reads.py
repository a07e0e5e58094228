"""A swap of weights that begins while the courier copies a model is not published, in no part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.asynchronous.published_model import PublishedModel
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.algorithms.models.writes import Writes
from bagua_kernels.comm import Communicator, open_mailbox, run_ranks
from tests.grids import grid

N = 8
OWN, FOREIGN = 1.0, 7.0


def published(communicator: Communicator) -> tuple[nn.Parameter, PublishedModel]:
    """A parameter of one value, and the model of it as the third step has left it."""
    parameter = nn.Parameter(torch.full((N,), OWN))
    flat = FlatParameters({"x": parameter})
    model = PublishedModel(flat, open_mailbox(communicator))
    model.writes = Writes(flat)
    model.end_write(version=3)
    return parameter, model


@grid(same=[False, True], begun=[False, True])
def test_swap_in_the_middle_of_a_copy(same: bool, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks get the model from before the swap.

    It comes from the copy before. If that is overwritten, or there is none, they get it when the weights are put back.

    Args:
        same: whether the copy goes into the memory of the one before.
        begun: whether there is one before.
    """

    def rank(communicator: Communicator) -> None:
        parameter, model = published(communicator)
        swaps, waits = list[int](), list[int]()
        copy_to = model._copy_to

        def copy(out: Sequence[torch.Tensor]) -> None:
            if len(swaps) < 1:
                swaps.append(1)
                parameter.data[: N // 2] = FOREIGN
            copy_to(out)

        def put_back() -> None:
            waits.append(1)
            parameter.data.fill_(OWN)

        model.check = put_back
        read = model.buffers()
        if begun:
            assert model.read(read) == (3, False)
        monkeypatch.setattr(model, "_copy_to", copy)
        out = read if same else model.buffers()
        assert model.read(out) == (3, False)
        assert swaps == [1]
        assert [each.tolist() for each in out] == [[OWN] * N]
        assert bool(waits) == (same or not begun)

    run_ranks(1, rank)


def test_swap_that_ends_within_a_copy() -> None:
    """Weights that are there again when the copy is done may be in it all the same: the next copy is published."""

    def rank(communicator: Communicator) -> None:
        parameter, model = published(communicator)
        copies = list[list[float]]()
        copy_to = model._copy_to

        @torch.no_grad()
        def copy(out: Sequence[torch.Tensor]) -> None:
            if not copies:
                parameter[: N // 2].fill_(FOREIGN)
            copy_to(out)
            copies.append(out[0].tolist())
            if len(copies) == 1:
                parameter.fill_(OWN)

        model._copy_to = copy  # type: ignore[method-assign]
        out = model.buffers()
        assert model.read(out) == (3, False)
        assert copies == [[FOREIGN] * (N // 2) + [OWN] * (N // 2), [OWN] * N]
        assert out[0].tolist() == [OWN] * N

    run_ranks(1, rank)
