"""The eight cells of {synchronous, asynchronous} x {full, low precision} x {all ranks, neighbours}: each trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, Wagma
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.mailbox.groups import Whole
from tests.algorithms.asynchronous.common import flat
from tests.algorithms.ranks import Odd, batch, fill

TEXT = (Path(__file__).parents[3] / "docs/algorithms/README.md").read_text()
ROWS = re.findall(r"^\| ((?:a?synchronous), [\w ]+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
CODEC = "minmax_uint8:block=64"


def cells() -> list[Any]:
    """What the page's table names: in each row a column of full precision, and one of low."""
    found = []
    for row, full, low in ROWS:
        found += [pytest.param(name, {}, id=f"{row}, full: {name}") for name in re.findall(r"`(\w+)`", full)]
        own = re.findall(r"`(\w+)`", low)
        name = own[0] if own and own[0] != "codec" else re.findall(r"`(\w+)`", full)[0]
        options = {"codec": CODEC} if "codec=" in low else {}
        found.append(pytest.param(name, options, id=f"{row}, low: {name}"))
    return found


def test_the_table_has_all_eight() -> None:
    assert [row for row, *_ in ROWS] == [
        f"{kind}, {peers}" for kind in ("synchronous", "asynchronous") for peers in ("all ranks", "neighbours")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), cells())
def test_each_cell_trains(name: str, options: dict[str, Any]) -> None:
    """All ranks fit one function, each on examples of its own."""
    size, steps = 4, 150
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(13, 7, generator=generator)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, float, float]:
        module = nn.Linear(7, 13)
        fill(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        kind = Algorithm.registered[name]
        model = kind(module, optimizer, communicator=communicator, **options)
        losses = []
        for step in range(steps):
            x = batch(communicator.rank, step)
            optimizer.zero_grad()
            loss = (model(x) - x @ truth.T).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if isinstance(model, ModelAlgorithm):
            model.synchronize()
        x = torch.randn(500, 7, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            last = float((module(x) - x @ truth.T).square().mean())
        model.close()
        return flat(module), losses[0], last

    results = run_ranks(size, rank)
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    first = sum(result[1] for result in results) / size
    assert results[0][2] < 0.1 * first


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_group_of_all_in_step_is_model_averaging(size: int) -> None:
    """Bit for bit: after each step the models are added up in the order of ranks, and divided by their number."""
    steps = 7

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module, seen = Odd(), []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        model = Wagma(module, optimizer, groups=Whole(communicator.size), period=1, communicator=communicator)
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            model.wait()
            seen.append(flat(module))
        model.close()
        return seen

    replicas = [Odd() for _ in range(size)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in replicas]
    expected = []
    for step in range(steps):
        for number, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            replica(batch(number, step)).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
                if parameters[0].requires_grad:
                    total = parameters[0].clone()
                    for parameter in parameters[1:]:
                        total += parameter
                    for parameter in parameters:
                        parameter.copy_(total / size)
        expected.append(flat(replicas[0]))
    for seen in run_ranks(size, rank):
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
