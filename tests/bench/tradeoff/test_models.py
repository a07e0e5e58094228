"""Seconds until models are as good as with all-reduce: what is measured once, and what is made of curves and steps."""

from __future__ import annotations

import dataclasses
import inspect
import io
import threading
from typing import Any

import pytest
import torch
from rich.console import Console

from bagua_kernels import algorithms
from bagua_kernels.algorithms.choosing.cost.methods import methods
from bagua_kernels.comm import run_ranks
from bench.convergence import measure
from bench.convergence.models import MODELS, ROWS
from bench.convergence.row import BASELINE
from bench.convergence.tasks import Data, Task
from bench.tradeoff import hosts, models, page


def made() -> Data:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return Data(x, x.argmax(1), x[:20], x[:20].argmax(1))


@pytest.fixture
def task() -> Task:
    return dataclasses.replace(MODELS["resnet"], data=made, model=lambda: torch.nn.Linear(4, 4), batch=2)


def test_all_rows_are_ways() -> None:
    for name in MODELS:
        found = models.ways(name)
        assert [way.name for way in found] == [*(row.label for row in ROWS if name in row.tasks), models.TUNER.name]
        for way in found:
            if way.kind == "local":
                assert inspect.signature(way.row.kind).parameters["interval"].default == way.interval
    assert {*models.KINDS} <= {row.label for row in ROWS}


def test_what_is_there_is_not_measured_again(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(count: int, part: str, settings: dict[str, Any], module: str) -> dict[str, Any]:
        assert (count, part, module) == (4, "model", "bench.tradeoff.hosts")
        # Of each of four ranks, on whose hosts nothing else is read.
        kept = torch.load(settings["batches"])
        assert [len(each) for each in kept] == [models.BATCHES] * 4
        (cell,) = settings["cells"]
        return {
            "rows": [{**cell, "seconds": {name: [0.1] for name in settings["ways"]}, "chosen": "diloco:interval=30"}],
            "tunings": {},
            "load_average": 0.0,
        }

    monkeypatch.setattr(models, "run", run)
    monkeypatch.setattr(measure, "run", lambda *given, looks: {"points": [(2.0, 0.1), (1.0, 0.5)]})
    part: dict[str, Any] = {"settings": {"steps": 20}, "curves": {}, "cells": {}, "tunings": {}}
    chosen = models.ways("resnet")[:2]

    def go(rates: list[float], ways: list[Any]) -> list[str]:
        missing = list(models.missing(part, task, ways, rates, made()))
        for _, each in missing:
            each()
        return [name for name, _ in missing]

    curves = [f"resnet: {way.name}, quality" for way in chosen]
    assert go([100.0], chosen) == [*curves, "resnet: 100 Mbit/s"]
    # What the tuner has chosen is trained when that is known.
    tuned = "resnet: AutoTune, any: diloco:interval=30, quality"
    assert go([100.0, 1000.0], chosen) == [tuned, "resnet: 1000 Mbit/s"]
    assert go([100.0, 1000.0], chosen) == []
    more = models.ways("resnet")[:3]
    assert len(go([100.0, 1000.0], more)) == 3


def test_curves_of_the_same_settings_are_taken() -> None:
    trained = {"settings": {"steps": 20}, "runs": {"ByteGrad": {"0": {"points": [[1.0, 0.5]]}}, "sign": {"0": {}}}}
    for steps, expected in ((20, {"ByteGrad": [[1.0, 0.5]]}), (10, {})):
        part: dict[str, Any] = {"settings": {"steps": steps, "seed": 0, "hosts": models.HOSTS}, "curves": {}}
        models.take(part, trained)
        assert part["curves"] == expected


def test_a_tuner_is_as_good_as_what_it_has_chosen() -> None:
    base, other = [(3.0, 0.1), (1.0, 0.7)], [(2.0, 0.3), (0.9, 0.8)]
    row = models.chosen_by_tuner("powersgd:rank=4")
    assert (row.kind.name, row.options) == ("powersgd", {"rank": 4})
    cell = {"rate": 100.0, "seconds": {BASELINE: [1.0], models.TUNER.name: [0.5]}, "chosen": "powersgd:rank=4"}
    part: dict[str, Any] = {"settings": {"steps": 20}, "curves": {BASELINE: base}, "cells": {"100": cell}}
    assert [one["row"] for one in models.summary(part)] == [BASELINE]
    part["curves"][row.label] = other
    found = models.summary(part)[1]
    assert (found["row"], found["chosen"]) == (models.TUNER.name, "powersgd:rank=4")
    assert found["seconds_loss"] == 0.5 * found["steps_loss"]


def test_seconds_until_both_goals() -> None:
    base = [(3.0, 0.1), (2.0, 0.5), (1.0, 0.7), (1.0, 0.7)]
    curves = {
        BASELINE: base,
        "ByteGrad": base,
        "DiLoCo": [(3.0, 0.1), (2.0, 0.5), (1.2, 0.698), (1.2, 0.698)],  # its loss stays larger
    }
    seconds = {BASELINE: [0.4, 0.6, 0.5], "ByteGrad": [0.1], "DiLoCo": [0.05], "not trained": [1.0]}
    part = {"settings": {"steps": 80}, "curves": curves, "cells": {"100": {"rate": 100.0, "seconds": seconds}}}
    rows = models.summary(part)
    found = {one["row"]: one for one in rows}
    assert [*found] == [*curves]
    assert found[BASELINE]["seconds_per_step"] == 0.5
    # Between the second look and the third, which is at 60 of 80 steps.
    assert 40 < found["ByteGrad"]["steps_loss"] <= 60
    assert found["ByteGrad"]["seconds_loss"] == pytest.approx(0.2 * found[BASELINE]["seconds_loss"])
    assert found["DiLoCo"]["seconds_loss"] is None
    assert found["DiLoCo"]["seconds_metric"] == pytest.approx(0.05 * found["DiLoCo"]["steps_metric"])
    text = io.StringIO()
    Console(file=text, width=150).print(models.table(MODELS["resnet"], rows))
    assert "5.00" in text.getvalue()


def test_a_trainee_uses_its_batches_in_turn(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(communicator: Any) -> list[float]:
        monkeypatch.setattr(hosts.comm, "world", lambda: communicator)
        batches = models.batches(dataclasses.replace(task, ranks=1), made())[0][:2]
        trainee = hosts.Trainee(models.ways("resnet")[0], task, batches)
        losses = []
        for _ in range(3):
            trainee.step()
            losses.append(trainee.loss().item())
        trainee.close()
        expected = [task.loss(trainee.module.module(x), y).item() for x, y in batches]
        # After three steps the second batch is next.
        assert losses[-1] == pytest.approx(expected[1])
        return losses

    (losses,) = run_ranks(1, rank)
    assert len({*losses}) == 3


def test_a_tuner_settles_before_it_is_timed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(hosts.comm, "world", lambda: own.communicator)

    def rank(communicator: Any) -> tuple[str, str]:
        own.communicator = communicator
        batches = models.batches(dataclasses.replace(task, ranks=1), made())[0][:2]
        trainee, spec = hosts.settled(models.TUNER, task, batches)
        name = trainee.algorithm.name if trainee.algorithm else ""
        if isinstance(trainee.algorithm, algorithms.RoundAlgorithm):
            assert trainee.way.interval == trainee.algorithm.interval
        trainee.close()
        return name, spec

    (name, spec), _ = run_ranks(2, rank)
    assert name in (algorithms.AutoTune.name, spec.partition(":")[0])
    assert spec in {method.spec for method in methods()}


def test_the_page_has_a_row_for_each_way_and_two_cells_for_each_network() -> None:
    def row(label: str, rate: float, step: float, loss: float | None, **more: str) -> dict[str, Any]:
        return {"row": label, "rate": rate, "seconds_per_step": step, "seconds_loss": loss, **more}

    rows = [row(BASELINE, 1000.0, 0.01, 10.0), row("DiLoCo", 1000.0, 0.005, 4.0)]
    rows += [row(BASELINE, 100.0, 0.1, 100.0), row("DiLoCo", 100.0, 0.006, None)]
    rows += [row("AutoTune, any", 100.0, 0.02, 50.0, chosen="bytegrad")]
    lines = page.table({"vgg": {"summary": rows}}).splitlines()
    assert lines[0] == "| model | row | 100 Mbit/s: ms | 100 Mbit/s: times | 1,000 Mbit/s: ms | 1,000 Mbit/s: times |"
    assert lines[2:] == [
        f"| vgg | {BASELINE} | 100.0 | 1.00 | 10.0 | 1.00 |",
        "| vgg | DiLoCo | 6.0 | – | 5.0 | 2.50 |",
        "| vgg | AutoTune, any | 20.0 | 2.00 (bytegrad) |  |  |",
    ]
