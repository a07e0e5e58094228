"""The study of trade-offs: what it compares, that it goes on where it was killed, and what it makes of its figures."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from bagua_kernels.algorithms import Algorithm
from bench.convergence.tasks import Data
from bench.tradeoff import measure, quality, report
from bench.tradeoff.ways import BATCH, FEW, FULL, SMALL, TASK, Cell, chosen, ways

LEFT_OUT = {"auto", "mu_loco"}


def test_every_algorithm_takes_part() -> None:
    assert {way.row.kind.name for way in ways()} == set(Algorithm.registered) - LEFT_OUT
    names = [way.name for way in ways()]
    assert len(set(names)) == len(names)
    assert {way.curve for way in ways() if way.curve} <= {way.name for way in ways() if not way.curve}
    assert [way.name for way in chosen(False)] == list(SMALL)
    assert set(FEW) <= set(FULL)


@pytest.mark.parametrize("name", ["allreduce", "local_sgd"])
def test_a_curve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes that a line tells apart are learnt; the same seed gives the same accuracies."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    data = Data(x, (x[:, 0] > 0).long(), x[:100], (x[:100, 0] > 0).long())
    task = dataclasses.replace(TASK, model=lambda: torch.nn.Linear(2, 2), ranks=2, batch=4)
    way = next(way for way in ways() if way.name == name)
    monkeypatch.setattr("bench.convergence.measure.LOOKS", 4)
    found = quality.curve(way, task, data, 0, 40)
    assert len(found) == 4
    assert found[-1] > 0.9
    assert quality.curve(way, task, data, 0, 40) == found


class Killed(Exception):
    """Stands for a signal."""


SETTINGS = {"full": False, "steps": 20, "seeds": 1, "batch": BATCH}


def fake(monkeypatch: pytest.MonkeyPatch, dies_at: Callable[[int], bool]) -> list[str]:
    """Stands in for training and for hosts; every call is noted, and may die."""
    calls: list[str] = []

    def note(name: str) -> None:
        calls.append(name)
        if dies_at(len(calls)):
            raise Killed

    def curve(way: Any, task: Any, data: Any, seed: int, steps: int) -> list[float]:
        note(way.name)
        return [0.1, 0.8 + len(way.name) / 1000]

    def run(hosts: int, part: str, settings: dict[str, Any], delay: float | None, module: str) -> dict[str, Any]:
        assert module == "bench.tradeoff.hosts"
        note(f"{settings['cells'][0]['rate']}")
        seconds = {name: [1.0 / (1 + place)] for place, name in enumerate(settings["ways"])}
        rows = [{**cell, "seconds": seconds, "costs": {}} for cell in settings["cells"]]
        return {"rows": rows, "tunings": {}, "load_average": 0.0}

    monkeypatch.setattr(quality, "curve", curve)
    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "images", lambda full: None)
    return calls


def go(path: Path) -> dict[str, Any]:
    results = measure.read(path, SETTINGS)
    tasks = list(measure.missing(results, chosen(False), FEW, 1, False))
    with Progress(disable=True) as progress:
        measure.study(results, tasks, path, progress, lambda name: True)
    return results


def test_a_study_that_is_killed_twice_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fake(monkeypatch, lambda call: False)
    expected = go(tmp_path / "whole.json")
    calls = fake(monkeypatch, lambda call: call in (4, len(whole) + 1))
    path = tmp_path / "study.json"
    for _ in range(2):
        with pytest.raises(Killed):
            go(path)
    assert json.loads(path.read_text())["cells"] == expected["cells"][:1]
    assert go(path) == expected == json.loads(path.read_text())
    # What was under way is done again, and nothing else.
    assert len(calls) == len(whole) + 2
    # Nothing is left to do but what a new way needs, and a study with other settings is not overwritten.
    assert not list(measure.missing(measure.read(path, SETTINGS), chosen(False), FEW, 1, False))
    more = [*chosen(False), next(way for way in ways() if way.name == "hook powersgd 4")]
    assert len(list(measure.missing(measure.read(path, SETTINGS), more, FEW, 1, False))) == len(FEW)
    with pytest.raises(ValueError, match="holds another study"):
        measure.read(path, {**SETTINGS, "steps": 30})


def test_steps_until_an_accuracy() -> None:
    points = [0.2, 0.6, 0.8, 0.8]
    assert report.steps_until(points, 0.7, 400) == pytest.approx(250)
    assert report.steps_until(points, 0.1, 400) == 100
    assert report.steps_until(points, 0.9, 400) is None
    # It has to stay there.
    assert report.steps_until([0.2, 0.8, 0.6, 0.8], 0.7, 400) == pytest.approx(350)


def results() -> dict[str, Any]:
    """DDP takes ten seconds a step, ByteGrad two, and local steps, which stay below its accuracy, one."""
    names = [way.name for way in chosen(False)]
    curves = {way.name: {"runs": {"0": [0.5, 0.9, 0.9]}} for way in chosen(False) if not way.curve}
    curves["local_sgd"] = {"runs": {"0": [0.5, 0.9, 0.89]}}
    seconds = {**{name: [10.0] for name in names}, "bytegrad": [2.0], "local_sgd": [1.0], "async 8 bits": [4.0]}
    slow = {name: [each[0] * (1.25 if name == "async 8 bits" else 2.0)] for name, each in seconds.items()}
    cells = [dataclasses.asdict(Cell(100.0, straggler=straggler)) for straggler in (False, True)]
    rows = [{**cell, "seconds": each} for cell, each in zip(cells, (seconds, slow), strict=True)]
    return {"settings": SETTINGS, "curves": curves, "cells": rows, "tunings": {}}


def test_steps_with_the_same_seeds() -> None:
    """On the way curves are compared with each other, at the end final accuracies."""
    found = results()
    names = {way.name: way for way in chosen(False)}
    found["curves"]["allreduce"] = {"runs": {"0": [0.5, 0.8, 0.9], "1": [0.1, 0.7, 0.8]}}
    found["curves"]["topk"] = {"runs": {"0": [0.3, 0.795, 0.9]}}
    assert report.steps_of({**found, "settings": {**SETTINGS, "steps": 300}}, names["topk"]) == 200
    assert report.steps_of(found, names["local_sgd"]) is None
    found["curves"]["topk"] = {"runs": {"0": [0.3, 0.7, 0.9]}}  # at the end it is there
    assert report.steps_of(found, names["topk"]) == SETTINGS["steps"]
    row = {"seconds": {"qadam": [1.0], "allreduce": [10.0]}}
    adam = next(way for way in ways() if way.name == "qadam")
    assert report.seconds_of(row, adam, 100, 400) == 80 * 10.0 + 20 * 1.0
    assert report.seconds_of(row, adam, 50, 400) == 500.0


def test_what_is_made_of_figures(tmp_path: Path) -> None:
    found = results()
    before = copy.deepcopy(found)
    (one, slow) = report.summary(found, chosen(False))
    assert (one["winner"], one["sooner"], one["synchronous"]) == ("bytegrad", pytest.approx(5), "bytegrad")
    assert (slow["winner"], slow["sooner"]) == ("bytegrad", pytest.approx(5))
    (kept,) = report.losses_by_straggler(found, chosen(False))
    assert (kept["best"], kept["keeps"], kept["ddp_keeps"]) == ("async 8 bits", pytest.approx(0.8), pytest.approx(0.5))
    console = Console(record=True, width=150, file=io.StringIO())
    report.show(console, found, chosen(False))
    assert "bytegrad" in console.export_text()
    report.plot(found, chosen(False), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5000
    assert found == before
