"""`bench.convergence`: how examples are dealt, what becomes of runs that diverge, a row of each kind on the ring, and text."""

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
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.rounds import Rounds
from bagua_kernels.errors import DivergenceError
from bench.convergence import gossip, local_steps, measure, pseudo_gradients
from bench.convergence.dealing import order_by_label, order_of
from bench.convergence.report import finite, judge, summary, table, unread
from bench.convergence.row import BASELINE, RING, TEXT, Row
from bench.convergence.rows import ROWS
from bench.convergence.tasks import CONTEXT, TASKS, Data, Task, perceptron
from examples.transformer import Transformer

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


@pytest.mark.slow
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

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `ModelAlgorithm.loop_for`."""
        loop = super().loop_for(local)
        end = loop.at_step_end

        def at_step_end() -> None:
            end()
            if local.communicator.rank == 1 and local.steps == 2:
                if self.poisoned:
                    next(self.module.parameters()).data.fill_(math.nan)
                raise DivergenceError("it diverges")

        loop.at_step_end = at_step_end  # type: ignore[method-assign]
        return loop


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


def windows() -> Data:
    """Windows of a text that repeats itself."""
    stream = torch.arange(EXAMPLES * CONTEXT) * 7 % 31
    x, y = stream.view(EXAMPLES, CONTEXT), stream.roll(-1).view(EXAMPLES, CONTEXT)
    return Data(x[:-8], y[:-8], x[-8:], y[-8:], "digest")


def tiny() -> torch.nn.Module:
    return Transformer(symbols=31, width=16, layers=1, heads=2)


@pytest.fixture
def text() -> Task:
    return dataclasses.replace(TASKS["text"], data=windows, model=tiny, batch=2, ranks=2, warm=0)


def short(row: Row, interval: int = 2) -> Row:
    """The row with shorter rounds."""
    return dataclasses.replace(row, options={**row.options, "interval": interval})


@pytest.mark.slow
def test_every_row_of_text_runs(text: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ROWS[0], *map(short, local_steps.ROWS)]
    assert [row.label for row in ROWS if "text" in row.tasks] == [row.label for row in rows]
    monkeypatch.setattr("bench.convergence.measure.ROWS", rows)
    monkeypatch.setattr("bench.convergence.report.ROWS", rows)
    console = Console(file=io.StringIO(), width=200)
    *_, last = measure.compare(text, rows, 4, 2, console, {}, new=False)
    found = {one["label"]: one for one in last["rows"]}
    assert last["data"] == "digest"
    assert found[local_steps.DILOCO]["bar"] == "loss ≤ 1.05 x"
    plain = found["plain averaging"]
    assert plain["loss_ratios"] == [
        run["loss"] / base["loss"] for run, base in zip(plain["runs"], found[local_steps.DILOCO]["runs"], strict=True)
    ]
    # Two rounds in four steps.
    assert plain["bytes_per_step"] == pytest.approx(found[BASELINE]["bytes_per_step"] / 2, rel=0.05)
    assert found["DiLoCo, 4 bits"]["bytes_per_step"] < 0.6 * plain["bytes_per_step"]
    assert all(isinstance(one["met"], bool) for label, one in found.items() if label != BASELINE)
    shown = console.file.getvalue()
    assert "validation loss" in shown
    # The loss is that of the windows that no rank has trained on.
    run = measure.run(text, rows[1], windows(), 4, 0)
    assert run["loss"] == found[local_steps.DILOCO]["runs"][0]["loss"]
    trained = measure.run(dataclasses.replace(text, validates=False), rows[1], windows(), 4, 0)
    assert trained["loss"] != run["loss"]


def two_rates(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": rate}, {"params": others, "lr": rate / 10}]
    return torch.optim.SGD(groups)


def test_a_row_may_make_its_optimizer(text: Task) -> None:
    rates = []

    def make(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        optimizer = two_rates(model, rate)
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    row = Row("own", algorithms.DiLoCo, {"interval": 2}, optimizer=make, rate=0.5, tasks=TEXT)
    one = dataclasses.replace(text, ranks=1, schedule=lambda done: 1 - done)
    runs = [measure.run(one, row, windows(), 4, 0)]
    assert rates == [pytest.approx([0.5 * (1 - step / 4), 0.05 * (1 - step / 4)]) for step in range(4)]
    described = summary(row, 4, runs)
    assert described["optimizer"] == "make"
    json.dumps(described)


def test_pseudo_gradients_are_what_ranks_have_changed(text: Task) -> None:
    """Of the second of four rounds: the sum of two steps of SGD."""
    taken: dict[str, torch.Tensor] = {}

    def make(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)

        def add(*_: object) -> None:
            for name, p in model.named_parameters():
                assert p.grad is not None
                step = optimizer.param_groups[0]["lr"] * p.grad.flatten()
                taken[name] = taken.get(name, 0) + step if len(seen) % 2 else step
            seen.append(len(seen))

        seen: list[int] = []
        optimizer.register_step_pre_hook(add)
        return optimizer

    row = Row("outer", algorithms.DiLoCo, {"interval": 2}, optimizer=make, rate=0.5, tasks=TEXT)
    one = dataclasses.replace(text, ranks=1)
    found = pseudo_gradients.recorded(one, row, steps=8)
    assert set(found) == set(taken)
    for name, values in found.items():
        torch.testing.assert_close(values, taken[name][None], atol=1e-6, rtol=1e-4)


def test_rows_begin_with_a_model_that_was_trained(text: Task) -> None:
    warm, data = dataclasses.replace(text, warm=3), text.data()
    row = short(local_steps.ROWS[0])

    def values(task: Task) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in measure.begun(task, data, 1).parameters()])

    assert torch.equal(values(warm), values(warm))
    assert not torch.equal(values(warm), values(text))
    told = measure.run(warm, row, data, 4, 1)
    start = measure.begun(warm, data, 1)
    assert (
        told["loss"] == measure.run(warm, row, data, 4, 1, start)["loss"] != measure.run(text, row, data, 4, 1)["loss"]
    )


def test_pseudo_gradients_of_each_rank(text: Task) -> None:
    found = pseudo_gradients.recorded(text, short(local_steps.ROWS[0]), steps=8, number=1)
    assert all(values.shape[0] == 2 and not torch.equal(*values) for values in found.values())
    with pytest.raises(ValueError, match="8 steps have 4 rounds of 2, got round 5"):
        pseudo_gradients.recorded(text, short(local_steps.ROWS[0]), steps=8, number=5)
    with pytest.raises(TypeError, match="expected a row with an outer loop"):
        pseudo_gradients.recorded(text, ROWS[0], steps=8)


def test_errors_of_codecs() -> None:
    # One value of a pair: |C(v) - v|^2 / |v|^2 of a sign is what the two differ by.
    vectors = [torch.tensor([1.0, 3.0]).repeat(4096)]
    assert pseudo_gradients.relative_error("sign", vectors) == pytest.approx(0.2, rel=1e-3)
    assert pseudo_gradients.relative_error("identity", vectors) == 0.0
    rows = pseudo_gradients.errors({"p": torch.randn(2, 4096), "small": torch.zeros(2, 10)}, ["sign"])
    assert rows[0]["bytes_per_element"] == pytest.approx(0.133, abs=0.02)
    assert rows[0]["pseudo_gradients"] == pytest.approx(rows[0]["normal"], rel=0.1)
    text = io.StringIO()
    Console(file=text, width=100).print(pseudo_gradients.table(rows))
    assert "0.36" in text.getvalue()
