"""`bench.convergence.wait_avoiding`: what its schemes see, all-reduce against gradients, and what its bars ask for."""

from __future__ import annotations

import pytest
import torch

from bench.convergence import wait_avoiding
from bench.convergence.tasks import Data


@pytest.fixture(autouse=True)
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random images instead of those of scikit-learn, which need not be installed."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(400, 64, generator=generator), torch.randint(10, (400,), generator=generator)
    monkeypatch.setattr(wait_avoiding, "data", lambda: Data(x, y, x[:9], y[:9]))


def test_schemes_see_the_same_examples_and_times() -> None:
    seconds = wait_avoiding.seconds(3)
    assert all(sum(rank[step] > 1 for rank in seconds) == 2 for step in range(wait_avoiding.STEPS))
    assert wait_avoiding.seconds(3) == seconds
    shards = wait_avoiding.shards(True, 0)
    labels = [set(wait_avoiding.data().y[each].tolist()) for each in shards]
    assert max(map(len, labels)) <= 3
    assert sorted(torch.cat(shards).tolist()) == list(range(len(wait_avoiding.data().y)))


def test_all_reduce_is_that_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of models after each step is the step with the mean gradient."""
    monkeypatch.setattr(wait_avoiding, "STEPS", 6)
    found = wait_avoiding.loss(wait_avoiding.SCHEMES["all-reduce"], False, 0)
    torch.manual_seed(0)
    model, own, data = wait_avoiding.perceptron(), wait_avoiding.shards(False, 0), wait_avoiding.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=wait_avoiding.RATE)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(wait_avoiding.RANKS):
            generator = torch.Generator().manual_seed(step * wait_avoiding.RANKS + rank)
            chosen = own[rank][torch.randint(len(own[rank]), (wait_avoiding.BATCH,), generator=generator)]
            (torch.nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen]) / wait_avoiding.RANKS).backward()
        optimizer.step()
    expected = torch.nn.functional.cross_entropy(model(data.x), data.y)
    assert found["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_bars_ask_for_order_in_every_seed() -> None:
    losses = {name: [1.0, 1.0] for name in wait_avoiding.SCHEMES}
    for place, name in enumerate(wait_avoiding.ROW):
        losses[name] = [1.2 ** (place + 1)] * 2
    losses["conservative, fixed groups"] = [3.0, 3.0]
    losses["conservative, all told"], losses["paper rule, all told"] = [2.0, 2.0], [5.0, 5.0]
    assert all(bar["holds"] for bar in wait_avoiding.bars(losses, True))
    losses["conservative"] = [1.9, 1.0]
    assert not all(bar["holds"] for bar in wait_avoiding.bars(losses, True))
    assert not wait_avoiding.bars(losses, False)[0]["holds"]
