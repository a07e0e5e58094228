"""Predictions of committed measurements: they repeat bit for bit, so that their errors have bars."""

import json
from pathlib import Path

import pytest

from bagua_kernels.algorithms.choosing.cost.facts import Machine
from bench.training import predictions


def test_committed_rows_are_predicted() -> None:
    report = json.loads((predictions.RESULTS / "training.json").read_text())
    machine = predictions.fit(report)
    found = predictions.errors(report, machine)
    told = predictions.summary(found)
    assert told["rows"] > 200
    assert told["rows_unseen"] > 100
    assert told["median_error"] <= 0.20
    assert told["median_error_unseen"] <= 0.25
    assert told["largest_ratio"] < 2.0, max(found, key=lambda row: abs(row["error"]))


def test_the_committed_profile_is_that_of_committed_rows(tmp_path: Path) -> None:
    report = json.loads((predictions.RESULTS / "training.json").read_text())
    fitted, saved = predictions.fit(report), Machine.load(predictions.RESULTS / "machine.json")
    assert saved.exposed == pytest.approx(fitted.exposed)
    assert saved.per_byte == pytest.approx(fitted.per_byte)
    assert dict(saved.work) == pytest.approx(dict(fitted.work))
