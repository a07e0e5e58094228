"""The table, the numbers and the picture that end an example."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("matplotlib")

from examples import report

MODEL = nn.Linear(9, 10)  # 100 parameters


def run(ranks: int = 2, steps: int = 30, bytes_per_step: int = 100) -> report.Run:
    """A run whose steps all look the same: 10 ms, of which 2.5 ms waiting; ten times as long before the sixth."""
    result = report.Run("made-up", MODEL, steps, rank=1, ranks=ranks)
    for step in range(1, steps + 1):
        stats = SimpleNamespace(bytes_sent=step * bytes_per_step, wait_seconds=step * 0.0025)
        result.step(1 / step, 32, stats)
        if step % 10 == 0:
            result.evaluation(step / 100)
    result.seconds = [0.1 * min(step, 5) + 0.01 * max(step - 5, 0) for step in range(1, steps + 1)]
    return result


def test_first_steps_do_not_count() -> None:
    assert run().seconds_per_step == pytest.approx(0.01)
    assert run().waiting_share == pytest.approx(0.25)
    # Too short a run has no steps to spare.
    assert run(steps=10).seconds_per_step == pytest.approx(0.055)


def test_time_of_the_picture_starts_after_the_first_steps() -> None:
    times = run().seconds_after_warm_up
    assert all(math.isnan(time) for time in times[:4])
    assert times[4] == 0
    assert times[-1] == pytest.approx(25 * 0.01)
    assert run(steps=10).seconds_after_warm_up == run(steps=10).seconds


def test_ratio_is_that_to_a_ring_all_reduce() -> None:
    assert run(ranks=2, bytes_per_step=100).compression_ratio == pytest.approx(4.0)
    assert run(ranks=4, bytes_per_step=600).compression_ratio == pytest.approx(1.0)
    assert run(ranks=1, bytes_per_step=0).compression_ratio is None


def test_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"dataset": "mnist", "epochs": 3, "data": None, "output": tmp_path}
    report.write([run(), run(bytes_per_step=50)], tmp_path / "results", options)
    table = capsys.readouterr().out
    assert "made-up" in table
    assert "8.00 ×" in table
    numbers = json.loads((tmp_path / "results/train.json").read_text())
    assert numbers["parameters"] == 100
    assert [entry["bytes_per_step"] for entry in numbers["runs"]] == [100, 50]
    assert numbers["runs"][0]["accuracy"][-1] == {"step": 30, "accuracy": 0.3}
    assert (tmp_path / "results/train.png").read_bytes().startswith(b"\x89PNG")
