"""`bench.convergence`: how examples are dealt, what becomes of runs that diverge, and a row of each kind on the ring."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from typing import Any

import pytest
import torch
from rich.console import Console

from bagua_kernels import algorithms
from bagua_kernels.errors import DivergenceError
from bench.convergence import gossip, measure
from bench.convergence.dealing import order_by_label, order_of
from bench.convergence.report import finite, judge, table, unread
from bench.convergence.row import BASELINE, RING, Row
from bench.convergence.rows import ROWS
from bench.convergence.tasks import TASKS, Data, Task, perceptron

EXAMPLES = 200
STEPS = 3


def made() -> Data:
    """Random images instead of those of scikit-learn, which need not be installed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 64, generator=generator)
    y = torch.randint(10, (EXAMPLES,), generator=generator)
    return Data(x, y, x[:20], y[:20])


@pytest.fixture
def task() -> Task:
    return dataclasses.replace(TASKS["ring"], data=made, batch=2, ranks=4)


def test_examples_at_random_come_once_before_any_comes_again(task: Task) -> None:
    order = order_of(EXAMPLES, task, 30, seed=3)
    assert order.shape == (30, 4, 2)
    assert order[:25].flatten().sort().values.tolist() == list(range(EXAMPLES))
    assert torch.equal(order, order_of(EXAMPLES, task, 30, seed=3))
    assert not torch.equal(order, order_of(EXAMPLES, task, 30, seed=4))


def test_examples_by_label_are_each_rank_s_own(task: Task) -> None:
    labels = made().y
    order = order_by_label(labels, task, 30, seed=3)
    assert order.shape == (30, 4, 2)
    # The last label of a rank may be the first of the next.
    seen = [labels[order[:, rank]] for rank in range(4)]
    assert all(one.max() <= other.min() for one, other in itertools.pairwise(seen))
    for rank in range(4):
        assert len(order[:25, rank].unique()) == 50
    assert len(order[:25].unique()) == EXAMPLES
    assert torch.equal(order, order_by_label(labels, task, 30, seed=3))
    assert not torch.equal(order, order_by_label(labels, task, 30, seed=4))


def trained(task: Task, rows: list[Row]) -> list[dict[str, Any]]:
    console = Console(file=io.StringIO(), width=200)
    *_, last = measure.compare(task, rows, STEPS, 2, console, {}, new=False)
    judge(task, last["rows"])
    return last["rows"]


def test_every_row_of_the_ring_runs(task: Task) -> None:
    rows = [row for row in ROWS if "ring" in row.tasks]
    assert len(rows) == len(gossip.ROWS) + 1
    found = {one["label"]: one for one in trained(task, rows)}
    assert set(found) == {row.label for row in rows}
    for label, one in found.items():
        assert 0 < one["loss"] < 10, label
        assert one["loss_ratios"] == [
            run["loss"] / base["loss"] for run, base in zip(one["runs"], found[one["baseline"]]["runs"], strict=True)
        ]
    # The same start, and other examples.
    assert found[BASELINE]["loss"] != found[gossip.BY_LABEL]["loss"]
    assert found["D-PSGD"]["met"] is True
    # After so few steps nothing is worse.
    assert found["D-PSGD, by label"]["met"] is False
    assert found["DCD, loud codec"]["met"] is False
    assert found["Choco, loud codec"]["runs"][0]["noise"] > 0.5
    assert found["DCD, 2 bits"]["bytes_per_step"] < 0.2 * found["D-PSGD"]["bytes_per_step"]


class Diverging(algorithms.Decentralized):
    """Diverges in its second round."""

    name = "diverging"
    poisoned = False

    def at_step_end(self) -> None:
        """See `ModelAlgorithm.at_step_end`."""
        super().at_step_end()
        if self._communicator.rank == 1 and self.stats().steps == 2:
            if self.poisoned:
                next(self.module.parameters()).data.fill_(math.nan)
            raise DivergenceError("it diverges")


class Poisoned(Diverging):
    """Diverges when it is too late."""

    name = "poisoned"
    poisoned = True


@pytest.mark.parametrize("kind", [Diverging, Poisoned])
def test_errors_that_are_expected(task: Task, kind: type[Diverging], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(BASELINE, algorithms.GradientAllReduce, tasks=RING),
        Row("diverges", kind, tasks=RING, raises=DivergenceError),
    ]
    monkeypatch.setattr("bench.convergence.measure.ROWS", rows)
    monkeypatch.setattr("bench.convergence.report.ROWS", rows)
    base, one = trained(task, rows)
    assert one["met"] is (kind is Diverging)
    assert "it diverges" in one["runs"][0]["error"]
    # As it is written, and read again.
    read = unread(json.loads(json.dumps(finite(one), allow_nan=False)))
    assert math.isnan(read["loss"])
    assert math.isnan(read["runs"][0]["accuracy"])
    text = io.StringIO()
    Console(file=text, width=200).print(table(task, [base, one]))
    assert "nan" not in text.getvalue()


def test_other_errors_are_raised(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("diverges", Diverging, tasks=RING)
    with pytest.raises(DivergenceError, match="it diverges"):
        measure.run(task, row, made(), STEPS, 0)
    assert task.model is perceptron
