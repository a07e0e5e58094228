"""Copies and pickles of modules that an algorithm on parameters has wrapped exchange nothing, and leave the original alone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from bagua_kernels.algorithms import ModelAlgorithm, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts
from tests.algorithms.ranks import Odd, batch, loss_of

SPECS = ["decentralized", "diloco:interval=2", "async_model_average:interval=1", "async_decentralized", "wagma"]


@pytest.mark.parametrize("spec", SPECS)
def test_copies_exchange_nothing(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        net = Odd()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = from_spec(spec, net, optimizer, communicator=communicator)
        assert isinstance(model, ModelAlgorithm)
        loss_of(model, communicator.rank, 0).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(net, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        copies = [copy.deepcopy(net), copy.deepcopy(copy.deepcopy(net)), copy.deepcopy(model), loaded]
        copies += [pickle.loads(pickle.dumps(model)), torch.optim.swa_utils.AveragedModel(net)]
        called: list[bool] = []
        loop = parts.loop(model)
        at_forward = loop.at_forward
        loop.at_forward = lambda training: (called.append(training), at_forward(training))[1]  # type: ignore[method-assign]
        for each in copies:
            each.train()
            each(batch(communicator.rank, 1)).sum().backward()
        assert not called
        loss_of(model, communicator.rank, 1).backward()
        assert called == [True]
        optimizer.step()
        model.close()

    run_ranks(2, rank, timeout=30)
