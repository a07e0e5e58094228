"""Rows of models: that a study goes on where it was killed, what it makes of its runs, and batches of similar cost."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from bench import resume
from bench.convergence import command, measure, page, paired
from bench.convergence.dealing import deal, order_by_cost, order_of
from bench.convergence.models import ALL, MODELS, ROWS
from bench.convergence.row import BASELINE, Row
from bench.convergence.tasks import Data, Task

EXAMPLES = 60


def made() -> Data:
    x = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return Data(x, x.argmax(1), x[:20], x[:20].argmax(1))


@pytest.fixture
def task() -> Task:
    return dataclasses.replace(MODELS["resnet"], data=made, model=lambda: torch.nn.Linear(4, 4), batch=2)


class Killed(Exception):
    """Stands for a signal."""


def fake(monkeypatch: pytest.MonkeyPatch, dies_at: int = 0) -> list[tuple[str, int]]:
    """Stands in for training; every run is noted, and may die."""
    calls: list[tuple[str, int]] = []

    def run(task: Task, row: Row, data: Data, steps: int, seed: int, *, looks: int) -> dict[str, Any]:
        assert looks == (1 if seed else measure.LOOKS)
        calls.append((row.label, seed))
        if len(calls) == dies_at:
            raise Killed
        loss = math.nan if row.label.startswith("sign") else len(row.label) + 0.5 * seed
        return {"loss": loss, task.metric_name: 0.9 - 0.01 * seed, "bytes_per_step": 8.0, "seconds": 1.0}

    monkeypatch.setattr(measure, "run", run)
    return calls


def go(path: Path, task: Task, seeds: int = 2) -> resume.Results:
    data, results = task.data(), resume.read(path)
    settings = paired.settings_of(task, data, 10)
    part = results["resnet"] = resume.begun(results.get("resnet", {}), settings, path, {"runs": {}})
    rows = measure.wanted(task, None, ROWS)
    with Progress(disable=True) as progress:
        resume.study(results, list(paired.missing(part, task, rows, data, seeds)), path, progress)
    return part


def test_each_row_and_seed_is_measured_once(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "models.json", [row.label for row in ROWS if "resnet" in row.tasks]
    first = fake(monkeypatch, dies_at=4)
    with pytest.raises(Killed):
        go(path, task)
    assert [*json.loads(path.read_text())["resnet"]["runs"]] == rows[:3]
    second = fake(monkeypatch)
    go(path, task)
    # All rows of a seed come before the next seed; the run that was killed is measured again.
    assert [*first[:3], *second] == [(label, seed) for seed in (0, 1) for label in rows]
    third = fake(monkeypatch)
    go(path, task, seeds=3)
    assert third == [(label, 2) for label in rows]
    with pytest.raises(ValueError, match="holds another study"):
        go(path, dataclasses.replace(task, rate=7.0))


def test_differences_are_those_of_seeds(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    path = tmp_path / "models.json"
    go(path, task)
    # As it is written, without a run of the baseline.
    part = json.loads(path.read_text(), parse_constant=pytest.fail)["resnet"]
    del part["runs"][BASELINE]["1"]
    found = {one["label"]: one for one in paired.summary(part, task)}
    one = found["ByteGrad"]
    assert (one["loss"], one["loss_differences"]) == (8.25, [-2.0])
    assert one["loss_deviation"] == pytest.approx(0.5 / math.sqrt(2))
    assert one["accuracy"] == pytest.approx(0.895)
    assert math.isnan(found["sign, momentum"]["loss"])
    shown = io.StringIO()
    Console(file=shown, width=200).print(paired.table(task, [*found.values()]))
    assert "8.2500 ± 0.3536" in shown.getvalue()
    assert "nan" not in shown.getvalue()


def test_models_have_a_command(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "resnet", task)
    output = str(tmp_path / "models.json")
    arguments = ["--tasks", "resnet", "--only", "Byte", "--steps", "3", "--seeds", "1", "--output", output]
    monkeypatch.setattr(sys, "argv", ["convergence", *arguments])
    threads = torch.get_num_threads()
    try:
        command.main()
    finally:
        torch.set_num_threads(threads)
    part = json.loads(Path(output).read_text())["resnet"]
    assert {label: [*runs] for label, runs in part["runs"].items()} == {BASELINE: ["0"], "ByteGrad": ["0"]}
    assert part["runs"]["ByteGrad"]["0"]["cpu_seconds"] > 0
    assert "ByteGrad" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["convergence", "--tasks", "resnet", "digits"])
    with pytest.raises(SystemExit):
        command.main()
    assert "results of another form" in capsys.readouterr().err


def test_rows_of_models() -> None:
    for name in MODELS:
        labels = [row.label for row in ROWS if name in row.tasks]
        assert labels[0] == BASELINE
        assert len({*labels}) == len(labels)
        assert {"ByteGrad", "PowerSGD rank 4", "Decentralized", "DiLoCo", "SparseLoCo", "Wagma"} <= {*labels}
    assert {*ALL} == {*MODELS}


def test_ranks_get_batches_of_similar_cost(task: Task) -> None:
    costs = torch.arange(1.0, 401.0, dtype=torch.float64)
    order = order_by_cost(costs, task, 75, seed=1)
    assert order.shape == (75, 4, 2)
    # An epoch of 50 steps has each example once.
    assert Counter(order[:50].flatten().tolist()) == Counter(range(400))
    longest = costs[order].max(dim=2).values
    assert (longest.max(dim=1).values - longest.min(dim=1).values).max() < 24
    assert torch.equal(order, order_by_cost(costs, task, 75, seed=1))
    assert not torch.equal(order, order_by_cost(costs, task, 75, seed=2))
    data = made()
    assert torch.equal(deal(data, task, 9, 3), order_of(EXAMPLES, task, 9, 3))
    unequal = dataclasses.replace(data, costs=costs[:EXAMPLES])
    assert torch.equal(deal(unequal, task, 7, 3), order_by_cost(costs[:EXAMPLES], task, 7, 3))


def test_the_page_marks_what_is_beyond_the_noise_of_seeds() -> None:
    losses = {BASELINE: (1.0, 1.1, 1.2), "ByteGrad": (1.0, 1.11, 1.21), "Decentralized": (1.2, 1.3, 1.4)}
    losses |= {"DiLoCo": (0.7, 0.8, 0.9), "sign, momentum": (None, 1.1, 1.2)}
    runs = {
        label: {
            str(seed): {"loss": loss, "accuracy": 0.5, "bytes_per_step": 1500.0, "seconds": 1.0, "cpu_seconds": 2.0}
            for seed, loss in enumerate(row)
        }
        for label, row in losses.items()
    }
    lines = page.table({"resnet": {"settings": {"steps": 1000}, "runs": runs}}).splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines if line.startswith("| ")}
    # The deviation is 0.1, and two of the difference of means of three are 0.163.
    assert [*cells] == ["row", "DiLoCo", BASELINE, "ByteGrad", "Decentralized", "sign, momentum"]
    assert cells[BASELINE][1:3] == ["1.1000 ± 0.1000", ""]
    assert [row[2] for row in cells.values()][1:] == ["-0.3000 ✓", "", "+0.0067", "+0.2000 ✗", "+nan ✗"]
    assert cells["ByteGrad"][-1] == "1.5 |"
    assert "1,000 steps of 16 samples a rank, 3 seeds." in lines
    # A study that is still going on: seeds that all rows have.
    del runs["DiLoCo"]["1"]
    lines = page.table({"resnet": {"settings": {"steps": 1000}, "runs": runs}}).splitlines()
    assert "1,000 steps of 16 samples a rank, 2 seeds." in lines
    assert any(line.startswith(f"| {BASELINE} | 1.1000 ± 0.1414 |") for line in lines)
    del runs["DiLoCo"]["2"]
    assert page.table({"resnet": {"settings": {"steps": 1000}, "runs": runs}}) == ""


def test_looks_on_the_way_change_nothing(task: Task) -> None:
    row = next(row for row in ROWS if row.label == "DiLoCo" and "resnet" in row.tasks)
    plain, looked = (measure.run(task, row, task.data(), 40, 0, looks=looks) for looks in (1, 4))
    points = looked.pop("points")
    assert len(points) == 4
    assert points[-1] == (looked["loss"], looked["accuracy"])
    assert {**looked, "seconds": 0} == {**plain, "seconds": 0}
